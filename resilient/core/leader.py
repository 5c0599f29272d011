"""The leader between the rendezvous's stream and the coordinator.

One pure function, `step(state, event, now_s) -> LeaderDecision`. The stream's changes become the
coordinator's events; its effects become records that are written to the rendezvous, one at a time
and in order, each on condition that this agent still leads. So a leader that was deposed changes
nothing any more, whatever it has decided since.

A new leader first listens: it begins with the stream's beginning (nodes, the last plan, orders,
reports that no plan has answered) and waits until each node has told what it runs. A node that
does not answer keeps it waiting no longer than its lease. Then takeover.py makes the coordinator's
state of it, and the reports follow in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from resilient.core import changes as ch
from resilient.core import coordinator, takeover
from resilient.core import events as ev
from resilient.core.model import Config, Outcome, Plan, State, Worker
from resilient.core.ranks import from_ranks, spans

Record = ch.Published | ch.Ordered | ch.Closed

MAX_EFFECTS_PER_ORDER = 500
REPEAT_S = 0.5
LISTEN_S = 10.0
"""How long a new leader waits for inventories; the nodes that have not told theirs by then are
taken for cut off, and come in when they do."""


@dataclass(frozen=True)
class Known:
    """One node, as the stream has it.

    Attributes:
        newest: number of its newest report that was read.
        decided: number of the newest that the coordinator has decided about, with all before it.
        joined: its inventory, made for this term.
    """

    incarnation: int
    num_slots: int
    newest: int = 0
    decided: int = 0
    joined: ev.NodeJoined | None = None


@dataclass(frozen=True)
class LeaderState:
    """All that a leader remembers between two events.

    Attributes:
        nodes: those with a lease.
        leads: the stream has confirmed the election.
        published: the last plan, this leader's own or an older one.
        newest_worker: the highest number that an older leader has ordered a worker to be started
            with, since the last plan.
        decorated: an older leader has heard that the script is.
        ended: the outcome that an older leader has told the workers of, and why.
        backlog: reports that came before everybody had told what it runs.
        job: the coordinator's state; None until then.
        queue: records to be written; the first of them is in flight when `in_flight`.
        retry_s: when the first record is tried again.
        queued_s: since when there is something to be written.
        listen_until_s: how long inventories are waited for.
        stopped: it leads no more.
    """

    config: Config
    node: str
    term: int
    nodes: Mapping[str, Known] = field(default_factory=dict)
    leads: bool = False
    published: ch.Published | None = None
    newest_worker: int = -1
    decorated: bool = False
    ended: tuple[Outcome, str] | None = None
    backlog: tuple[ch.Reported, ...] = ()
    job: State | None = None
    queue: tuple[Record, ...] = ()
    in_flight: bool = False
    retry_s: float | None = None
    queued_s: float | None = None
    listen_until_s: float | None = None
    num_orders: int = 0
    wake_s: float | None = None
    stopped: bool = False


# ---------------------------------------------------------------- events, beside the stream's


@dataclass(frozen=True)
class Batch:
    """Changes that came together: reports in it that say the same are told as one."""

    changes: tuple[ch.Change, ...]


@dataclass(frozen=True)
class Written:
    """The record in flight is in the rendezvous."""


@dataclass(frozen=True)
class WriteFailed:
    """No answer, or none that says whether it is: the same record is written again."""

    note: str = ""


@dataclass(frozen=True)
class Refused:
    """The rendezvous says that this agent does not lead, or that the plan comes too late."""

    note: str = ""


@dataclass(frozen=True)
class Local:
    """An event of this agent's own: the store that it was to open."""

    event: ev.Event


@dataclass(frozen=True)
class TimePassed:
    pass


LeaderEvent = ch.Change | Batch | Written | WriteFailed | Refused | Local | TimePassed

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class Write:
    """Write the record, if this agent leads in its term, and say Written, WriteFailed or Refused.

    It may have been written before: the same again is no error.
    """

    record: Record


@dataclass(frozen=True)
class OpenStore:
    """Open the generation's TCPStore here and say Local(StoreOpened)."""

    generation: int


@dataclass(frozen=True)
class Stopped:
    """It leads no more; nothing it decides from here on has an effect."""


LeaderEffect = Write | OpenStore | Stopped


class LeaderDecision(NamedTuple):
    """What a step of the leader gives.

    Attributes:
        decisions: of the coordinator, each with the event that led to it, for the journal.
    """

    state: LeaderState
    effects: tuple[LeaderEffect, ...] = ()
    wake_s: float | None = None
    decisions: tuple[tuple[ev.Event, ev.Decision], ...] = ()
    reason: str = ""


def initial(config: Config, node: str, term: int) -> LeaderState:
    """Before the first change of the stream, which has to be fed from its beginning."""
    config.check()
    return LeaderState(config, node, term)


def step(state: LeaderState, event: LeaderEvent, now_s: float) -> LeaderDecision:
    """What the event changes. now_s: this agent's monotonic clock."""
    if state.stopped:
        return LeaderDecision(state, reason="leads no more")
    turn = _Turn(state, now_s)
    changes = event.changes if isinstance(event, Batch) else (event,)
    for change in changes:
        if not turn.state.stopped:
            _HANDLERS[type(change)](turn, change)
    turn.flush()
    _take_over_if_due(turn)
    _write_if_due(turn)
    return turn.decision()


class _Turn:
    """One step in the making."""

    def __init__(self, state: LeaderState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[LeaderEffect] = []
        self.decisions: list[tuple[ev.Event, ev.Decision]] = []
        self.told: list[ev.Event] = []  # to the coordinator, once equal ones are merged
        self.read: dict[str, int] = {}  # node -> number of its newest report among those

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def know(self, node: str, **changes: Any) -> None:
        known = replace(self.state.nodes[node], **changes)
        self.set(nodes={**self.state.nodes, node: known})

    def tell(self, event: ev.Event, report: ch.Reported | None = None) -> None:
        """Tells the coordinator. Events of members wait for others of their kind (see flush)."""
        if not isinstance(event, ev.MemberEvent):
            self.flush()
        self.told.append(event)
        if report is not None and report.number:
            self.read[report.node] = report.number
        if not isinstance(event, ev.MemberEvent):
            self.flush()  # who has a rank may be another question from here on

    def flush(self) -> None:
        told, self.told = self.told, []
        read, self.read = self.read, {}
        if self.state.job is None:
            return
        events = merged(told, self.state.job.plan, self.state.job.extras)
        for index, event in enumerate(events):
            if index == len(events) - 1:  # what is published because of it answers all of them
                for node, number in read.items():
                    if node in self.state.nodes:
                        self.know(node, decided=number)
            self.decide(event)

    def decide(self, event: ev.Event) -> None:
        assert self.state.job is not None
        if self.state.stopped:
            return
        decision = coordinator.step(self.state.job, event, self.now_s)
        self.decisions.append((event, decision))
        is_news = decision.state.decorated and not self.state.job.decorated
        self.set(job=decision.state, wake_s=decision.wake_s)
        if is_news and self.state.published is None:
            self.order((), decorated=True)  # the next leader could not know
        self.enqueue(decision.effects)

    def enqueue(self, effects: Iterable[ev.Effect]) -> None:
        orders: list[ev.Effect] = []
        for effect in effects:
            match effect:
                case ev.OpenStore(generation):
                    self.effects.append(OpenStore(generation))
                case ev.PublishPlan(plan):
                    self.order(orders)
                    orders = []
                    assert self.state.job is not None
                    self.publish(plan)
                case ev.Finish(outcome, _, reason):
                    self.order(orders)
                    orders = []
                    self.write(ch.Closed(reason, outcome))
                case ev.StartGeneration() | ev.ExcludeSlot():
                    pass  # agents enter a plan when they see it
                case _:
                    orders.append(effect)
        self.order(orders)

    def publish(self, plan: Plan) -> None:
        """What was read and not decided yet is not answered: it would be lost with this leader."""
        assert self.state.job is not None
        known = self.state.nodes
        answered = {node: (k.incarnation, k.decided) for node, k in known.items()}
        incarnations = {node: known[node].incarnation for node in plan.nodes if node in known}
        archive = takeover.archive(self.state.job)
        self.write(ch.Published(plan, answered, incarnations, archive))

    def order(self, effects: Sequence[ev.Effect], *, decorated: bool = False) -> None:
        if decorated:
            number = self.state.num_orders + 1
            self.set(num_orders=number)
            self.write(ch.Ordered(self.state.term, number, (), decorated=True))
        for first in range(0, len(effects), MAX_EFFECTS_PER_ORDER):
            number = self.state.num_orders + 1
            some = tuple(effects[first : first + MAX_EFFECTS_PER_ORDER])
            known = self.state.nodes
            concerned = sorted({node for effect in some for node in _nodes_of(effect)} & set(known))
            incarnations = {node: known[node].incarnation for node in concerned}
            self.set(num_orders=number)
            self.write(ch.Ordered(self.state.term, number, some, incarnations))

    def write(self, record: Record) -> None:
        queued_s = self.now_s if not self.state.queue else self.state.queued_s
        self.set(queue=(*self.state.queue, record), queued_s=queued_s)

    def stop(self) -> None:
        self.effects.append(Stopped())
        self.set(stopped=True, queue=(), in_flight=False, job=None)

    def decision(self) -> LeaderDecision:
        state = self.state
        if state.stopped:
            return LeaderDecision(state, (Stopped(),), None, (), "leads no more")
        wake_s = None if state.queue else state.wake_s
        every = (wake_s, state.retry_s, state.listen_until_s)
        times = [max(time, self.now_s + 0.001) for time in every if time is not None]
        reason = "; ".join(decision.reason for _, decision in self.decisions) or "noted"
        return LeaderDecision(
            state, tuple(self.effects), min(times, default=None), tuple(self.decisions), reason
        )


# ---------------------------------------------------------------- the stream


def _node_arrived(turn: _Turn, change: ch.NodeArrived) -> None:
    known = turn.state.nodes.get(change.node)
    if known is not None and known.incarnation == change.incarnation:
        return
    known = Known(change.incarnation, change.num_slots)
    turn.set(nodes={**turn.state.nodes, change.node: known})


def _node_gone(turn: _Turn, change: ch.NodeGone) -> None:
    known = turn.state.nodes.get(change.node)
    if known is None or known.incarnation != change.incarnation:
        return
    turn.set(nodes={n: k for n, k in turn.state.nodes.items() if n != change.node})
    if turn.state.job is not None and known.joined is not None:
        turn.tell(_left(change.node, change.incarnation, change.certain))


def _nodes_of(effect: ev.Effect) -> set[str]:
    """The nodes whose workers the effect is about."""
    match effect:
        case ev.StartWorker() | ev.KillWorker() | ev.TerminateWorker() | ev.Persist() | ev.Look():
            return {effect.worker.node}
        case ev.AbortGeneration() | ev.DumpStacks() | ev.Close() | ev.Stop():
            return {worker.node for worker in effect.workers}
    return set()


def _left(node: str, incarnation: int, certain: bool) -> ev.NodeLeft:
    note = "its agent is gone" if certain else "its lease has ended"
    return ev.NodeLeft(node, note, incarnation, certain)


def _leader_changed(turn: _Turn, change: ch.LeaderChanged) -> None:
    if change.term < turn.state.term:
        return
    if change.node == turn.state.node and change.term == turn.state.term:
        turn.set(leads=True)
    else:
        turn.stop()


def _published(turn: _Turn, change: ch.Published) -> None:
    last = turn.state.published
    if last is None or change.plan.generation > last.plan.generation:
        turn.set(published=change)


def _ordered(turn: _Turn, change: ch.Ordered) -> None:
    if change.term == turn.state.term:
        return
    turn.set(decorated=turn.state.decorated or change.decorated)
    for effect in change.effects:
        if isinstance(effect, ev.StartWorker):
            turn.set(newest_worker=max(turn.state.newest_worker, effect.worker.number))
        elif isinstance(effect, ev.Close):
            turn.set(ended=(Outcome.DONE, "every rank has finished"))
        elif isinstance(effect, ev.Stop):
            turn.set(ended=(effect.outcome, effect.reason))


def _reported(turn: _Turn, change: ch.Reported) -> None:
    known = turn.state.nodes.get(change.node)
    if known is None or known.incarnation != change.incarnation:
        return
    if change.number:
        if change.number <= known.newest:
            return
        turn.know(change.node, newest=change.number)
    if isinstance(change.event, ev.NodeJoined):
        if change.event.term >= turn.state.term:
            turn.know(change.node, joined=change.event)
            if turn.state.job is not None:
                turn.tell(change.event)
                for report in turn.state.backlog:
                    if report.node == change.node:
                        turn.tell(report.event)
                turn.read[change.node] = change.number
                turn.set(backlog=tuple(r for r in turn.state.backlog if r.node != change.node))
    elif turn.state.job is None or known.joined is None:
        turn.set(backlog=(*turn.state.backlog, change))
    else:
        turn.tell(change.event, change)


def _job_closed(turn: _Turn, change: ch.Closed) -> None:
    turn.stop()


# ---------------------------------------------------------------- taking over, writing


def _take_over_if_due(turn: _Turn) -> None:
    """Once every node has told what it runs."""
    state = turn.state
    if state.stopped or state.job is not None or not state.leads or not state.nodes:
        return
    if state.listen_until_s is None:
        turn.set(listen_until_s=turn.now_s + LISTEN_S)
        state = turn.state
    assert state.listen_until_s is not None
    joined = [known.joined for _, known in sorted(state.nodes.items())]
    inventories = [inventory for inventory in joined if inventory is not None]
    if len(inventories) < len(joined) and turn.now_s < state.listen_until_s:
        return
    if not inventories:
        turn.set(listen_until_s=turn.now_s + LISTEN_S)  # not even this node's own stream is heard
        return
    backlog = [
        report.event
        for report in state.backlog
        if report.node in state.nodes
        and report.incarnation == state.nodes[report.node].incarnation
        and state.nodes[report.node].joined is not None
    ]
    resumed = takeover.resume(
        state.config,
        state.published,
        inventories,
        backlog,
        turn.now_s,
        newest_worker=state.newest_worker,
        decorated=state.decorated,
        ended=state.ended,
    )
    unheard = {node for node, known in state.nodes.items() if known.joined is None}
    later = tuple(report for report in state.backlog if report.node in unheard)
    turn.set(job=resumed.state, backlog=later, listen_until_s=None)
    turn.enqueue(resumed.effects)
    for event in resumed.events:
        turn.tell(event)
    turn.tell(ev.TimePassed())
    turn.flush()
    for node, known in sorted(turn.state.nodes.items()):
        if node not in unheard:
            turn.know(node, decided=known.newest)


def _write_if_due(turn: _Turn) -> None:
    state = turn.state
    if state.stopped or state.in_flight or not state.queue:
        return
    if state.retry_s is not None and turn.now_s < state.retry_s:
        return
    turn.set(in_flight=True, retry_s=None)
    turn.effects.append(Write(state.queue[0]))


def _written(turn: _Turn, event: Written) -> None:
    assert turn.state.in_flight
    record, *rest = turn.state.queue
    turn.set(in_flight=False, queue=tuple(rest))
    if isinstance(record, ch.Published):
        turn.set(published=record)
    job, queued_s = turn.state.job, turn.state.queued_s
    if not rest and job is not None and queued_s is not None:
        # Bounds count from when the agents can know: not from when it was decided.
        late_s = turn.now_s - queued_s
        turn.set(queued_s=None)
        if job.deadline_s is not None and late_s > REPEAT_S:
            job = replace(job, deadline_s=job.deadline_s + late_s)
            turn.set(job=job, wake_s=job.deadline_s)


def _write_failed(turn: _Turn, event: WriteFailed) -> None:
    turn.set(in_flight=False, retry_s=turn.now_s + REPEAT_S)


def _refused(turn: _Turn, event: Refused) -> None:
    turn.stop()


def _local(turn: _Turn, event: Local) -> None:
    if turn.state.job is not None:
        turn.tell(event.event)


def _time_passed(turn: _Turn, event: TimePassed) -> None:
    wake_s = turn.state.wake_s
    if turn.state.queue:
        return  # what it has decided is not known yet, and nobody is late
    if turn.state.job is not None and wake_s is not None and turn.now_s >= wake_s:
        turn.tell(ev.TimePassed())


_HANDLERS: dict[type[Any], Callable[[_Turn, Any], None]] = {
    ch.NodeArrived: _node_arrived,
    ch.NodeGone: _node_gone,
    ch.LeaderChanged: _leader_changed,
    ch.Published: _published,
    ch.Ordered: _ordered,
    ch.Reported: _reported,
    ch.Closed: _job_closed,
    Written: _written,
    WriteFailed: _write_failed,
    Refused: _refused,
    Local: _local,
    TimePassed: _time_passed,
}


def merged(
    events: Sequence[ev.Event], plan: Plan | None, extras: Container[Worker] = ()
) -> list[ev.Event]:
    """The same events, those of members that differ in nothing but the worker as one Alike.

    extras: workers that have no rank now, whatever the plan says: they speak for themselves.
    The order of what one worker says is kept; what different ones say at one time has none.
    """
    if plan is None or len(events) < 2:
        return list(events)
    groups: dict[Any, list[tuple[int, ev.MemberEvent]]] = {}
    for index, event in enumerate(events):
        rank = None
        if isinstance(event, ev.MemberEvent) and event.generation == plan.generation:
            rank = None if event.worker in extras else plan.rank_of(event.worker)
        if rank is None or not isinstance(event, ev.MemberEvent):
            groups[index] = []
        else:
            key = replace(event, worker=plan.members[0].worker)
            groups.setdefault(key, []).append((rank, event))
    told: list[ev.Event] = []
    for key, group in groups.items():
        if isinstance(key, int):
            told.append(events[key])
        elif len(group) == 1:
            told.append(group[0][1])
        else:
            group.sort(key=lambda one: one[0])
            told.append(ev.Alike(group[0][1], spans(from_ranks(rank for rank, _ in group))))
    return told
