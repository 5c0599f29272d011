"""One agent's own decisions: what it still has to tell, whether it leads, whether it may go on.

One pure function, `step(state, event, now_s) -> NodeDecision`; the agent is its shell and the
rendezvous is what it talks to. Two ideas.

Nothing that matters is only in a leader's memory. What an agent has seen stays in its outbox until
a *plan* answers it; being read by a leader is not enough, since that leader may be gone before it
has decided. And to each new leader an agent tells its inventory: which workers it runs and what
they hold. All orders of the old leader come before the change of leaders in the stream, so the
inventory is complete.

While a node holds its lease, the others count on it; when it cannot renew, it must have stopped
before anybody else may take its ranks. The lease's end is counted from when the renewal was
*sent*, and a margin earlier. A node whose generation spans other nodes goes on until it sees a
fault (the others hold the same generation: nobody has replaced it yet), but no longer than the
orphans' bound: all of its peers may be cut off with it. One that is alone in its generation, or
sees a fault, fences itself: it leaves the generation and keeps the state. Without a lease it
enters no generation. Whoever does not come out of a fence is killed.

One node alone has a lease without an end: nobody could take over from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core.model import INSIDE, Outcome, Plan, Status, Worker, WorkerReport
from resilient.errors import ConfigError

_ADVICE = (ev.PaceMeasured, ev.WorkerSlow, ev.TimePassed)
"""Told once: a leader that never hears it decides as well without."""

_FAULTS = (ev.WorkerExited, ev.WorkerFailed, ev.WorkersHung)
"""Of these, one is enough for a node without a lease to stop."""

_OF_A_LEASE = (ev.StartWorker, ev.KillWorker, ev.TerminateWorker, ev.Persist, ev.Look)
"""Not done without one: the leader counts this node as gone, or will, and decides anew."""

_OF_THE_NODE = (ev.DrainRequested, ev.HealthCheckFailed)
"""What a new incarnation has to tell again; all else is in its inventory."""


@dataclass(frozen=True)
class NodeConfig:
    """Times in seconds.

    Attributes:
        node: its name.
        num_slots: workers it can run.
        repeat_s: a report that was not taken in is sent again after this long.
        fence_margin_s: how long before the end of its lease a node begins to stop; those who have
            not come out after half of it are killed.
        interrupt_timeout_s: the time to come out of a fence where the lease does not press.
        orphan_timeout_s: without a lease, nobody goes on for longer than this.
    """

    node: str
    num_slots: int
    repeat_s: float = 1.0
    fence_margin_s: float = 2.0
    interrupt_timeout_s: float = 5.0
    orphan_timeout_s: float = 300.0

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        if self.num_slots < 1:
            raise ConfigError("a node must have at least 1 slot")
        if not (self.repeat_s > 0 and self.fence_margin_s >= 0):
            raise ConfigError("the times of a node must be greater than 0 seconds")
        if not self.interrupt_timeout_s < self.orphan_timeout_s:
            raise ConfigError("a node must come out of a fence within the orphans' bound")


@dataclass(frozen=True)
class Report:
    """One event for the coordinator, in the outbox.

    Attributes:
        number: counts up; a leader takes each number of an incarnation once, and in order.
        stored: the rendezvous has it.
    """

    number: int
    event: ev.Event
    stored: bool = False


@dataclass(frozen=True)
class NodeState:
    """All that an agent remembers between two events.

    Attributes:
        incarnation: of this node, given with the lease; None while not registered.
        lease_ends_s: None: it never does (one node alone), or there is none.
        term: of its own leadership; None: it does not lead.
        leader_term: of the newest leader seen in the stream.
        told: (incarnation, term) that the inventory was last told for.
        last_order: (term, number) of the newest order carried out.
        plan: newest one seen.
        is_meant: its members here are of this incarnation.
        entered: generation that this node's members were last told to enter.
        aborted: newest generation that an order has aborted.
        outbox: what no plan has answered yet, in order.
        sent_s: when reports were handed to the rendezvous whose answer is not there yet.
        fenced: it has left its generation by itself and waits, state kept, for a new lease.
        kill_s: when those who have not left fenced_generation, or an older one, are killed.
        has_killed: they were; kill_s is when it is reported that they did not end.
        usual_step_s: measured pace; who computes comes out no sooner than at the end of a step.
        workers: this node's own, living.
        persisted_step: newest complete on disk that one of them has told of.
        decorated: one of them has reached the decorator.
        deferred: orders that came while there was no lease: carried out if it is renewed after all.
    """

    config: NodeConfig
    incarnation: int | None = None
    lease_ends_s: float | None = None
    lost_lease: bool = False
    term: int | None = None
    leader_term: int = 0
    told: tuple[int, int] | None = None
    last_order: tuple[int, int] = (0, 0)
    plan: Plan | None = None
    is_meant: bool = False
    entered: int = -1
    aborted: int = -1
    outbox: tuple[Report, ...] = ()
    sent_s: float | None = None
    next_number: int = 1
    fenced: bool = False
    kill_s: float | None = None
    fenced_generation: int = -1
    has_killed: bool = False
    usual_step_s: float = 0.0
    workers: Mapping[Worker, WorkerReport] = field(default_factory=dict)
    persisted_step: int | None = None
    decorated: bool = False
    deferred: tuple[ev.Effect, ...] = ()
    closed: bool = False


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Registered:
    """The rendezvous knows this node, as a new incarnation. ends_s None: a lease without end."""

    incarnation: int
    ends_s: float | None


@dataclass(frozen=True)
class Renewed:
    """ends_s: counted from when the renewal was sent, not from its answer."""

    ends_s: float


@dataclass(frozen=True)
class LeaseLost:
    """The rendezvous says that the lease has ended, or its stream cannot be followed any more."""


@dataclass(frozen=True)
class Elected:
    term: int


@dataclass(frozen=True)
class Changed:
    """The next change of the rendezvous's stream."""

    change: ch.Change


@dataclass(frozen=True)
class Seen:
    """Something that the coordinator has to know, whoever leads."""

    event: ev.Event


@dataclass(frozen=True)
class Stored:
    """The rendezvous has the reports up to that number."""

    number: int


@dataclass(frozen=True)
class TimePassed:
    pass


NodeEvent = Registered | Renewed | LeaseLost | Elected | Changed | Seen | Stored | TimePassed

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class Register:
    """Get a lease, as a new incarnation, and say Registered."""

    node: str
    num_slots: int


@dataclass(frozen=True)
class Campaign:
    """Stand for election, unless it already does, and say Elected once it is won. Should the
    rendezvous hold this node for the leader already, a new term begins."""


@dataclass(frozen=True)
class SendReports:
    """Hand them to the rendezvous in one transaction, and say Stored with the last number.

    There is one such request at a time, and a repetition has all of it and more: else a report
    could overtake one before it, and a leader that takes them in order would never see that one.
    """

    reports: tuple[tuple[int, ev.Event], ...]


@dataclass(frozen=True)
class Advise:
    """Pass it to the leader; nothing is lost if it does not arrive."""

    event: ev.Event


@dataclass(frozen=True)
class Forget:
    """Remove this node's reports up to that number from the rendezvous: they are answered."""

    up_to: int


@dataclass(frozen=True)
class Lead:
    """Lead from here: feed leader.py the stream from its beginning."""

    term: int


@dataclass(frozen=True)
class StepDown:
    """Stop leading, and give the leadership back if the rendezvous has not taken it already: a
    term is led once, from its beginning."""


@dataclass(frozen=True)
class EnterGeneration:
    """This node's members of the plan are to enter it."""

    plan: Plan


@dataclass(frozen=True)
class Fence:
    """Have this node's workers leave the generation and any older one, keep their state, and
    persist nothing."""

    generation: int
    reason: str


@dataclass(frozen=True)
class CarryOut:
    """One of the leader's effects, about workers of this node."""

    effect: ev.Effect


@dataclass(frozen=True)
class End:
    """The job is over: what is left here is killed, and the agent ends."""

    reason: str
    outcome: Outcome | None


NodeEffect = (
    Register
    | Campaign
    | SendReports
    | Advise
    | Forget
    | Lead
    | StepDown
    | EnterGeneration
    | Fence
    | CarryOut
    | End
)


class NodeDecision(NamedTuple):
    """What a step of the node gives; as `events.Decision`."""

    state: NodeState
    effects: tuple[NodeEffect, ...] = ()
    wake_s: float | None = None
    reason: str = ""


def initial(config: NodeConfig) -> NodeDecision:
    """The state before anything has happened, and the first effects."""
    config.check()
    return NodeDecision(NodeState(config), (Register(config.node, config.num_slots),))


def step(state: NodeState, event: NodeEvent, now_s: float) -> NodeDecision:
    """What the event changes for this node. now_s: its monotonic clock, as in Registered.ends_s.

    Returns:
        Effects in order; wake_s: next repetition of a report, or the last moment to stop before
        the lease ends, or to kill what does not stop.
    """
    if state.closed:
        return NodeDecision(state, reason="the job has ended")
    state, effects, reason = _HANDLERS[type(event)](state, event, now_s)
    if state.closed:
        return NodeDecision(state, tuple(effects), None, reason)
    for rule in (_fence_if_due, _kill_if_due, _tell_inventory):
        result = rule(state, event, now_s)
        if result is not None:
            state, more, why = result
            effects, reason = [*effects, *more], why or reason
    state, sends = _send_due(state, now_s)
    return NodeDecision(state, (*effects, *sends), _wake_s(state, now_s), reason or "noted")


def may_enter(state: NodeState, now_s: float) -> bool:
    """Whether this node may enter a generation or persist anything now."""
    return state.incarnation is not None and not state.lost_lease and not _is_ending(state, now_s)


_Result = tuple[NodeState, list[NodeEffect], str]

# ---------------------------------------------------------------- the lease


def _registered(state: NodeState, event: Registered, now_s: float) -> _Result:
    again = state.incarnation is not None
    state = replace(
        state,
        incarnation=event.incarnation,
        lease_ends_s=event.ends_s,
        lost_lease=False,
        fenced=False,
        deferred=(),
        sent_s=None,
        # What the last incarnation reported went with its lease; the inventory says it anew.
        outbox=tuple(
            replace(r, stored=False)
            for r in state.outbox
            if not again or isinstance(r.event, _OF_THE_NODE)
        ),
    )
    effects: list[NodeEffect] = [Campaign()]
    generation = _generation_inside(state)
    if generation is not None:  # the others have given this node up, and its generation with it
        state, more, _ = _fence(state, generation, "registered anew", now_s, None)
        state = replace(state, fenced=False)
        effects += more
    return state, effects, f"registered as incarnation {event.incarnation}"


def _renewed(state: NodeState, event: Renewed, now_s: float) -> _Result:
    if state.lost_lease or state.lease_ends_s is None:
        return state, [], ""
    was_ending = _is_ending(state, now_s)
    state = replace(state, lease_ends_s=max(state.lease_ends_s, event.ends_s))
    if not was_ending or _is_ending(state, now_s):
        return state, [], ""
    deferred = state.deferred
    state, effects, _ = _enter_if_due(replace(state, fenced=False, deferred=()), now_s)
    for effect in deferred:
        state, more = _carry_out(state, effect)
        effects += more
    return state, [Campaign(), *effects], "the lease was renewed after all"


def _lease_lost(state: NodeState, event: LeaseLost, now_s: float) -> _Result:
    if state.lost_lease or state.incarnation is None:
        return state, [], ""
    effects: list[NodeEffect] = [StepDown()] if state.term is not None else []
    effects.append(Register(state.config.node, state.config.num_slots))
    ends_s = now_s if state.lease_ends_s is None else min(state.lease_ends_s, now_s)
    state = replace(state, lost_lease=True, term=None, lease_ends_s=ends_s)
    return state, effects, "the lease has ended"


def _is_ending(state: NodeState, now_s: float) -> bool:
    ends_s = state.lease_ends_s
    return ends_s is not None and now_s >= ends_s - state.config.fence_margin_s


# ---------------------------------------------------------------- leadership and the stream


def _elected(state: NodeState, event: Elected, now_s: float) -> _Result:
    if not may_enter(state, now_s):
        return state, [], "elected without a lease: not counted"
    if event.term < state.leader_term or event.term == state.term:
        return state, [], "elected in a term that is over"
    return replace(state, term=event.term), [Lead(event.term)], f"leads, term {event.term}"


def _changed(state: NodeState, event: Changed, now_s: float) -> _Result:
    handler = _CHANGES.get(type(event.change))
    return handler(state, event.change, now_s) if handler is not None else (state, [], "")


def _gone(state: NodeState, change: ch.NodeGone, now_s: float) -> _Result:
    if (change.node, change.incarnation) != (state.config.node, state.incarnation):
        return state, [], ""
    return _lease_lost(state, LeaseLost(), now_s)


def _leader_changed(state: NodeState, change: ch.LeaderChanged, now_s: float) -> _Result:
    if change.term > state.leader_term:  # who leads now is told what runs here, and decides anew
        state = replace(state, leader_term=change.term, deferred=())
    mine = change.node == state.config.node and change.term == state.term
    if state.term is None or mine or change.term < state.term:
        return state, [], ""
    return replace(state, term=None), [StepDown(), Campaign()], "leads no more"


def _published(state: NodeState, change: ch.Published, now_s: float) -> _Result:
    effects: list[NodeEffect] = []
    incarnation, answered = change.answered.get(state.config.node, (0, 0))
    if incarnation != state.incarnation:
        answered = 0
    kept = tuple(r for r in state.outbox if r.number > answered)
    if len(kept) < len(state.outbox):
        effects.append(Forget(answered))
    state = replace(state, outbox=kept)
    if state.plan is not None and change.plan.generation <= state.plan.generation:
        return state, effects, "an older plan"
    meant = change.incarnations.get(state.config.node) == state.incarnation
    state = replace(state, plan=change.plan, is_meant=meant)
    older = _generation_inside(state)
    if older is not None and older > state.fenced_generation:  # a newer one has begun without it
        was_fenced = state.fenced
        state, more, _ = _fence(state, older, "a newer generation has begun", now_s, None)
        state = replace(state, fenced=was_fenced)
        effects += more
    state, more, reason = _enter_if_due(state, now_s)
    return state, effects + more, reason


def _enter_if_due(state: NodeState, now_s: float) -> _Result:
    """Enters the newest plan, unless it has been entered or aborted, or there is no lease."""
    plan = state.plan
    if plan is None or plan.generation <= max(state.entered, state.aborted):
        return state, [], ""
    if not _members(state) or not state.is_meant:
        return state, [], "stands by"
    if not may_enter(state, now_s) or state.fenced:
        return state, [], "no lease: enters no generation"
    workers = dict(state.workers)
    for member in plan.members:
        known = workers.get(member.worker)
        if known is not None and known.status not in INSIDE:
            workers[member.worker] = replace(
                known, status=Status.ENTERED, slot=member.slot, generation=plan.generation,
                step=plan.cut.step, holdings=(),
            )  # fmt: skip
    state = replace(state, entered=plan.generation, workers=workers)
    return state, [EnterGeneration(plan)], f"generation {plan.generation}"


def _ordered(state: NodeState, change: ch.Ordered, now_s: float) -> _Result:
    if change.term < state.leader_term or (change.term, change.number) <= state.last_order:
        return state, [], ""
    meant = change.incarnations.get(state.config.node)
    if meant is None or meant != state.incarnation:
        return state, [], "none of this node's"
    state = replace(state, last_order=(change.term, change.number))
    effects: list[NodeEffect] = []
    for effect in change.effects:
        if isinstance(effect, ev.AbortGeneration):
            state = _aborted(state, effect.generation, now_s)
        mine = _own_part(state, effect)
        if mine is not None and isinstance(mine, _OF_A_LEASE) and not may_enter(state, now_s):
            state = replace(state, deferred=(*state.deferred, mine))
        elif mine is not None:
            state, more = _carry_out(state, mine)
            effects += more
    return state, effects, f"order {change.term}/{change.number}"


def _carry_out(state: NodeState, effect: ev.Effect) -> tuple[NodeState, list[NodeEffect]]:
    if isinstance(effect, ev.StartWorker):
        if effect.worker in state.workers:
            return state, []
        report = WorkerReport(effect.worker, Status.STARTING, effect.slot)
        state = replace(state, workers={**state.workers, effect.worker: report})
    return state, [CarryOut(effect)]


def _own_part(state: NodeState, effect: ev.Effect) -> ev.Effect | None:
    """What of the effect concerns this node."""
    node = state.config.node
    match effect:
        case ev.StartWorker() | ev.KillWorker() | ev.TerminateWorker() | ev.Persist() | ev.Look():
            return effect if effect.worker.node == node else None
        case ev.AbortGeneration() | ev.DumpStacks() | ev.Close() | ev.Stop():
            workers = tuple(worker for worker in effect.workers if worker.node == node)
            return replace(effect, workers=workers) if workers else None
    return None


def _aborted(state: NodeState, generation: int, now_s: float) -> NodeState:
    """An abort of a generation that this node has not entered: its members can say so at once."""
    plan = state.plan
    state = replace(state, aborted=max(state.aborted, generation))
    if plan is None or plan.generation != generation or state.entered >= generation:
        return state
    for member in _members(state):
        known = state.workers.get(member)
        if known is not None and known.status in (Status.READY, Status.FINISHED):
            left = ev.WorkerInterrupted(member, generation, known.step, known.holdings)
            state = _enqueue(state, left)
    return state


def _closed(state: NodeState, change: ch.Closed, now_s: float) -> _Result:
    state = replace(state, closed=True, outbox=(), term=None)
    return state, [End(change.reason, change.outcome)], f"the job has ended: {change.reason}"


_CHANGES: dict[type[Any], Callable[[NodeState, Any, float], _Result]] = {
    ch.NodeGone: _gone,
    ch.LeaderChanged: _leader_changed,
    ch.Published: _published,
    ch.Ordered: _ordered,
    ch.Closed: _closed,
}

# ---------------------------------------------------------------- what its workers do


def _seen(state: NodeState, event: Seen, now_s: float) -> _Result:
    state = replace(state, workers=_note(state.workers, event.event))
    told = event.event.step if isinstance(event.event, ev.Persisted) else None
    persisted_step = getattr(event.event, "persisted_step", told)
    if isinstance(event.event, ev.WorkerReady):
        state = replace(state, decorated=True)
    if isinstance(event.event, ev.PaceMeasured):
        state = replace(state, usual_step_s=event.event.usual_step_s)
    if persisted_step is not None and persisted_step > (state.persisted_step or -1):
        state = replace(state, persisted_step=persisted_step)
    if isinstance(event.event, _ADVICE):
        return state, [Advise(event.event)], ""
    return _enqueue(state, event.event), [], ""


def _enqueue(state: NodeState, event: ev.Event) -> NodeState:
    report = Report(state.next_number, event)
    return replace(state, outbox=(*state.outbox, report), next_number=report.number + 1)


def _note(workers: Mapping[Worker, WorkerReport], event: ev.Event) -> Mapping[Worker, WorkerReport]:
    """The inventory after what one worker has done."""
    worker = getattr(event, "worker", None)
    known = workers.get(worker) if worker is not None else None
    if known is None:
        return workers
    match event:
        case ev.WorkerExited():
            return {w: report for w, report in workers.items() if w != worker}
        case ev.WorkerReady():
            known = replace(known, status=Status.READY)
        case ev.WorkerJoined():
            known = replace(known, status=Status.JOINED)
        case ev.WorkerRestored():
            known = replace(known, status=Status.RESTORED)
        case ev.WorkerStepped():
            known = replace(known, step=event.step)
        case ev.WorkerInterrupted() | ev.WorkerFailed() | ev.WorkerFinished():
            finished = isinstance(event, ev.WorkerFinished)
            known = replace(
                known,
                status=Status.FINISHED if finished else Status.READY,
                generation=event.generation,
                step=event.step,
                holdings=tuple(holding.of(event.generation) for holding in event.holdings),
            )
        case _:
            return workers
    return {**workers, known.worker: known}


def _stored(state: NodeState, event: Stored, now_s: float) -> _Result:
    outbox = tuple(replace(r, stored=True) if r.number <= event.number else r for r in state.outbox)
    return replace(state, outbox=outbox, sent_s=None), [], ""


def _time_passed(state: NodeState, event: TimePassed, now_s: float) -> _Result:
    return state, [], ""


_HANDLERS: dict[type[Any], Callable[[NodeState, Any, float], _Result]] = {
    Registered: _registered,
    Renewed: _renewed,
    LeaseLost: _lease_lost,
    Elected: _elected,
    Changed: _changed,
    Seen: _seen,
    Stored: _stored,
    TimePassed: _time_passed,
}


def _members(state: NodeState) -> list[Worker]:
    """This node's members of the newest plan."""
    members = state.plan.members if state.plan is not None else ()
    return [member.worker for member in members if member.slot.node == state.config.node]


def _inside(state: NodeState, up_to: int | None = None) -> list[Worker]:
    """Those that are in a generation; up_to: in that one or an older one."""
    return [
        worker
        for worker, known in sorted(state.workers.items())
        if known.status in INSIDE and (up_to is None or known.generation <= up_to)
    ]


def _generation_inside(state: NodeState) -> int | None:
    """The newest one that a worker is in: one that does not die may be in an older one."""
    return max((state.workers[worker].generation for worker in _inside(state)), default=None)


def _is_alone(state: NodeState) -> bool:
    members = state.plan.members if state.plan is not None else ()
    return all(member.slot.node == state.config.node for member in members)


# ---------------------------------------------------------------- rules after every event


def _fence_if_due(state: NodeState, event: NodeEvent, now_s: float) -> _Result | None:
    """Fences a node without a lease that is alone in its generation, sees a fault, or has gone on
    for as long as orphans may."""
    if state.fenced or state.incarnation is None:
        return None
    if not state.lost_lease and not _is_ending(state, now_s):
        return None
    effects: list[NodeEffect] = []
    if state.term is not None:  # somebody else may lead from now on
        state = replace(state, term=None)
        effects.append(StepDown())
    generation = _generation_inside(state)
    fault = isinstance(event, Seen) and isinstance(event.event, _FAULTS)
    assert state.lease_ends_s is not None
    orphaned = now_s >= state.lease_ends_s + state.config.orphan_timeout_s
    if generation is None or not (_is_alone(state) or fault or orphaned):
        return (state, effects, "no lease: goes on, leads no more") if effects else None
    if fault:
        reason = "a fault while the lease could not be renewed"
    else:
        reason = "the lease is ending" if not orphaned else "without a lease for too long"
    by_s = state.lease_ends_s if _is_alone(state) else None
    state, more, _ = _fence(state, generation, reason, now_s, by_s)
    return state, effects + more, reason


def _fence(
    state: NodeState, generation: int, reason: str, now_s: float, by_s: float | None
) -> _Result:
    """by_s: when nobody may be inside any more; None: nobody is waiting for it.

    A machine that was frozen until after that has missed it in any case: then what its workers hold
    is worth more than their haste.
    """
    kill_s = now_s + max(state.config.interrupt_timeout_s, 3 * state.usual_step_s)
    if by_s is not None and by_s - state.config.fence_margin_s / 2 > now_s:
        kill_s = min(kill_s, by_s - state.config.fence_margin_s / 2)
    state = replace(
        state, fenced=True, kill_s=kill_s, fenced_generation=generation, has_killed=False
    )
    return state, [Fence(generation, reason)], reason


def _kill_if_due(state: NodeState, event: NodeEvent, now_s: float) -> _Result | None:
    """Kills those who have not left a generation that this node has fenced itself out of."""
    if state.kill_s is None:
        return None
    inside = _inside(state, up_to=state.fenced_generation)
    if inside and now_s < state.kill_s:
        return None
    if not inside:
        return replace(state, kill_s=None, has_killed=False), [], ""
    if state.has_killed:  # nothing of ours ends these: whoever leads has to do without them
        step = max(state.workers[worker].step for worker in inside)
        note = "does not end after SIGKILL"
        hung = ev.WorkersHung(state.fenced_generation, tuple(inside), step, now_s, note)
        return _enqueue(replace(state, kill_s=None, has_killed=False), hung), [], note
    kills: list[NodeEffect] = [
        CarryOut(ev.KillWorker(worker, "did not leave its generation in time")) for worker in inside
    ]
    by_s = now_s + state.config.interrupt_timeout_s
    return replace(state, kill_s=by_s, has_killed=True), kills, "killing what does not stop"


def _tell_inventory(state: NodeState, event: NodeEvent, now_s: float) -> _Result | None:
    """To each leader, and from each incarnation, once."""
    if state.incarnation is None or state.lost_lease or state.leader_term == 0:
        return None
    now = (state.incarnation, state.leader_term)
    if state.told == now:
        return None
    config = state.config
    workers = tuple(report for _, report in sorted(state.workers.items()))
    inventory = ev.NodeJoined(
        config.node,
        config.num_slots,
        state.incarnation,
        workers,
        now[1],
        state.persisted_step,
        state.decorated,
    )
    kept = tuple(r for r in state.outbox if not isinstance(r.event, ev.NodeJoined))
    return _enqueue(replace(state, outbox=kept, told=now), inventory), [], "tells what it runs"


def _send_due(state: NodeState, now_s: float) -> tuple[NodeState, list[NodeEffect]]:
    """Hands over what the rendezvous does not have: at once, or when the last try is over."""
    if state.incarnation is None or state.lost_lease:
        return state, []
    reports = tuple((r.number, r.event) for r in state.outbox if not r.stored)
    if not reports:
        return replace(state, sent_s=None), []
    if state.sent_s is not None and now_s < state.sent_s + state.config.repeat_s:
        return state, []
    return replace(state, sent_s=now_s), [SendReports(reports)]


def _wake_s(state: NodeState, now_s: float) -> float | None:
    times = []
    if state.sent_s is not None and not state.lost_lease:
        times.append(state.sent_s + state.config.repeat_s)
    if state.lease_ends_s is not None and not state.fenced:
        ends_s = state.lease_ends_s
        times += [ends_s - state.config.fence_margin_s, ends_s + state.config.orphan_timeout_s]
    if state.kill_s is not None:
        times.append(state.kill_s)
    return min((time for time in times if time > now_s), default=None)
