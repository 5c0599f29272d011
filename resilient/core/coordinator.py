"""The leader's decisions: who is in the next generation, and what is done to get there.

One pure function, `step(state, event, now_s) -> Decision`. The agent is its shell: it feeds what it
sees and carries out what comes back. `TABLE` says which handler looks at which event in which
phase, every cell of it; a handler records what the event proves and reacts where the reaction does
not depend on others. What depends on everybody ("all ranks have reported", "a replacement is there
for every hole", "the bound is over") is decided in transitions.py, after every event.

    FORMING ──► RESTORING ──► RUNNING ──► CLOSED
                 ▲     │         │
                 │     └──► STOPPING ◄┘
                 └─ COLLECTING ◄┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resilient.core import events as ev
from resilient.core.events import Decision, Event
from resilient.core.model import (
    INSIDE,
    Config,
    FaultKind,
    Outcome,
    Phase,
    State,
    Status,
    Worker,
    WorkerState,
    extra_of,
)
from resilient.core.move import Move, describe_status
from resilient.core.policy import root_cause
from resilient.core.ranks import Ranks, bit, from_ranks, from_spans, full
from resilient.core.transitions import (
    SIGKILL_STATUS,
    abort,
    advance,
    close,
    count,
    end,
    exclude,
    kill_hung,
    kill_late,
    staff,
    terminate_group,
)


def initial(config: Config) -> State:
    """The state before anything has happened.

    Raises:
        ConfigError: config is out of range, or its bounds are not ordered.
    """
    config.check()
    return State(config)


def step(state: State, event: Event, now_s: float) -> Decision:
    """What the event changes and what is to be done about it.

    Args:
        now_s: the caller's monotonic clock; never goes back.
    Returns:
        Effects in order: PublishPlan before its StartGeneration, DumpStacks before the abort.
        After Finish nothing more is decided.
    """
    if state.finished:
        return Decision(state, reason="the job has ended")
    move = Move(state, now_s)
    TABLE[type(event)][state.phase](move, event)
    advance(move)
    return Decision(
        move.state, tuple(move.effects), move.state.deadline_s, "; ".join(move.reasons) or "noted"
    )


Handler = Callable[[Move, Any], None]


def _ignore(move: Move, event: Event) -> None:
    """Changes nothing: stale, or of no consequence in this phase."""


# ---------------------------------------------------------------- nodes, stores, clocks


def _node_joined(move: Move, event: ev.NodeJoined) -> None:
    state, node = move.state, event.node
    if node in state.nodes:
        if state.incarnations.get(node) == event.incarnation:
            return
        gone = ev.NodeLeft(node, "it came anew", state.incarnations.get(node, 0), certain=False)
        _node_left(move, gone)
    first = not move.state.nodes
    numbers = [report.worker.number for report in event.workers]
    move.set(
        nodes={**move.state.nodes, node: event.num_slots},
        incarnations={**move.state.incarnations, node: event.incarnation},
        next_number=max([move.state.next_number - 1, *numbers]) + 1,
    )
    ranks = _ranks_on(move, node)
    inside = 0
    for report in event.workers:
        if report.step > move.state.committed_step:  # which nobody who is left had told of
            move.set(num_barren=0)
        move.know(report.step)
        known = extra_of(report)
        move.own_extras()[report.worker] = replace(
            known, holdings=move.usable(known.holdings, known.generation)
        )
        if move.current(known.generation):
            move.set(unsure=False)
            if known.status in INSIDE:
                inside |= _rank_bit(move, report.worker)
            if _is_beyond_cut(move, report.step):
                _count_step(move, report.step)
    move.know(persisted_step=event.persisted_step)
    move.set(decorated=move.state.decorated or event.decorated)
    roster = move.state.roster
    move.set(
        roster=replace(roster, lost=roster.lost & ~ranks),
        away=move.state.away - {node},
        silent=move.state.silent & ~(ranks & ~inside),  # it says itself who is out of it
    )
    move.why(f"node {node} joined with {event.num_slots} slots")
    if move.state.phase is Phase.FORMING and move.state.plan is None:
        if first and not move.state.stores:
            move.do(ev.OpenStore(move.state.num_restarts))
    elif move.state.phase in (Phase.RUNNING, Phase.COLLECTING, Phase.FORMING):
        staff(move, node)


def _node_left(move: Move, event: ev.NodeLeft) -> None:
    state, node = move.state, event.node
    if node not in state.nodes or state.incarnations.get(node, 0) != event.incarnation:
        return
    move.set(
        nodes={n: slots for n, slots in state.nodes.items() if n != node},
        losses={**state.losses, node: state.losses.get(node, 0) + 1},
    )
    ranks = _ranks_on(move, node)
    roster = move.state.roster
    lost = move.workers(ranks & roster.alive)
    if move.state.phase is not Phase.CLOSED:
        move.faults(FaultKind.NODE_LOST, lost, move.state.committed_step, note=event.note)
    extras = [w for w in move.state.extras if w.node == node]
    if not event.certain and (lost or any(_may_hold(state.extras[w]) for w in extras)):
        config = state.config
        move.set(
            away=state.away | {node},
            silent=state.silent | (ranks & roster.inside),
            orphans_until_s=move.now_s + config.orphan_timeout_s + config.kill_timeout_s,
            away_until_s=move.now_s + config.orphan_timeout_s + config.quorum_timeout_s,
            soon_until_s=move.now_s + config.rendezvous_timeout_s,
        )
    if lost:
        move.set(look_due=True)
    move.set(roster=replace(roster, lost=roster.lost | ranks))
    move.drop([*lost, *extras])
    if not lost:
        return
    if move.state.phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"node {node} is lost")
    elif move.state.phase is Phase.FORMING and not move.state.decorated:
        move.set(root_cause=root_cause(move.state.faults))
        terminate_group(move, 15, f"node {node} is lost")


def _may_hold(known: WorkerState) -> bool:
    """Whether a worker without a rank holds state, or is still to say so."""
    return bool(known.holdings) or known.status in INSIDE


def _rank_bit(move: Move, worker: Worker) -> Ranks:
    """The rank it had, as a set: also of one whose node was lost."""
    rank = move.state.plan.rank_of(worker) if move.state.plan else None
    return 0 if rank is None else bit(rank)


def _ranks_on(move: Move, node: str) -> Ranks:
    return from_ranks(move.state.plan.ranks_on(node)) if move.state.plan else 0


def _store_opened(move: Move, event: ev.StoreOpened) -> None:
    stores = {**move.state.stores, event.generation: (event.host, event.port)}
    move.set(stores=stores)


def _pace(move: Move, event: ev.PaceMeasured) -> None:
    move.set(usual_step_s=event.usual_step_s)


def _persisted(move: Move, event: ev.Persisted) -> None:
    move.know(persisted_step=event.step)
    if move.state.looking == event.worker:
        move.set(looking=None, look_due=False, looked=True)
    if move.state.persisting == event.worker:
        move.set(persisting=None)
        assert move.state.outcome is not None
        how = f"step {event.step} is on disk" if event.step is not None else event.note
        close(move, move.state.outcome, f"{move.state.outcome_reason}; {how}")


def _health(move: Move, event: ev.HealthCheckFailed) -> None:
    if event.slot in move.state.excluded:
        return
    move.set(excluded=move.state.excluded | {event.slot})
    move.do(ev.ExcludeSlot(event.slot, event.note))
    warm = [w for w, known in move.state.extras.items() if known.slot == event.slot]
    move.kill(sorted(warm), "its slot is excluded")
    plan = move.state.plan
    has_rank = plan is not None and plan.has_slot(event.slot)
    if has_rank and move.state.phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"slot {event.slot} excluded: {event.note}")


# ---------------------------------------------------------------- workers that are well


def _ready(move: Move, event: ev.WorkerReady) -> None:
    known = move.worker(event.worker)
    if known is None or known.status is not Status.STARTING:
        return
    move.know(persisted_step=event.persisted_step)
    move.change(event.worker, status=Status.READY)
    if move.state.phase is Phase.FORMING and not move.state.decorated:
        move.set(decorated=True)
        move.enter(Phase.FORMING, move.state.config.start_timeout_s)
        move.why("the script is decorated")


# What a member says of its generation, many may say alike: these take the ranks that say it.

RanksHandler = Callable[[Move, Any, Ranks], None]
Leaving = ev.WorkerInterrupted | ev.WorkerFailed | ev.WorkerFinished


def _of_ranks(handler: RanksHandler) -> Handler:
    """For the event of one member of the current generation, or of many; of an older one: nothing.

    One code for both, so that what holds for many holds for one.
    """

    def handle(move: Move, event: ev.MemberEvent | ev.WorkerFailed | ev.Alike) -> None:
        told = event.event if isinstance(event, ev.Alike) else event
        if not isinstance(event, ev.Alike) and told.worker in move.state.extras:
            _extra_left(move, told)
            return
        plan = move.state.plan
        if plan is None or not move.current(told.generation):
            return
        if isinstance(event, ev.Alike):
            handler(move, told, from_spans(event.ranks) & full(plan.world_size))
        elif (rank := plan.rank_of(told.worker)) is not None:
            handler(move, told, bit(rank))

    return handle


def _extra_left(move: Move, told: ev.MemberEvent | ev.WorkerFailed) -> None:
    """One whose node was lost has come out of the generation that it was in."""
    known = move.state.extras[told.worker]
    if not isinstance(told, Leaving):
        return
    if known.status not in INSIDE or told.generation != known.generation:
        return
    move.know(told.step, told.persisted_step)
    holdings = move.usable(told.holdings, told.generation)
    move.change(told.worker, status=Status.READY, holdings=holdings)
    if move.current(told.generation):
        move.set(silent=move.state.silent & ~_rank_bit(move, told.worker))


@_of_ranks
def _joined(move: Move, event: ev.WorkerJoined, ranks: Ranks) -> None:
    move.put(ranks & move.state.roster.entered, Status.JOINED)


@_of_ranks
def _restored(move: Move, event: ev.WorkerRestored, ranks: Ranks) -> None:
    move.put(ranks & move.state.roster.inside, Status.RESTORED)


@_of_ranks
def _stepped(move: Move, event: ev.WorkerStepped, ranks: Ranks) -> None:
    move.know(event.step)
    _count_step(move, event.step)


def _count_step(move: Move, step: int) -> None:
    """The current generation has committed a step: what was counted until then is forgotten."""
    if not move.state.stepped:
        newer = frozenset(key for key in move.state.errors_seen if key[0] >= step)
        move.set(stepped=True, num_barren=0, deaths={}, errors_seen=newer)
        move.why(f"step {step - 1} is committed in this generation")


def _is_beyond_cut(move: Move, step: int) -> bool:
    """Whether a restored rank's last step is beyond the cut: its first commit may go unheard."""
    return move.state.plan is not None and step > move.state.plan.cut.step


@_of_ranks
def _finished(move: Move, event: ev.WorkerFinished, ranks: Ranks) -> None:
    _leave(move, event, ranks, Status.FINISHED)


def _leave(move: Move, event: Leaving, ranks: Ranks, status: Status) -> Ranks:
    """Records that these ranks have left the current generation; gives those that were inside."""
    roster = move.state.roster
    ranks &= roster.inside
    if ranks:
        move.know(event.step, event.persisted_step)
        if ranks & roster.restored and _is_beyond_cut(move, event.step):
            _count_step(move, event.step)
        move.put(ranks, status, move.usable(event.holdings, event.generation))
    return ranks


# ---------------------------------------------------------------- workers that are not


@_of_ranks
def _interrupted(move: Move, event: ev.WorkerInterrupted, ranks: Ranks) -> None:
    left = _leave(move, event, ranks, Status.READY)
    if left and move.state.phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"{event.worker} left its generation")


@_of_ranks
def _failed(move: Move, event: ev.WorkerFailed, ranks: Ranks) -> None:
    if not _leave(move, event, ranks, Status.READY):
        return
    kind = FaultKind.COLLECTIVE if event.in_collective else FaultKind.RAISED
    move.fault(kind, event.worker, event.step, error=event.error)
    if move.state.phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"rank {move.rank(event.worker)}: {event.error.type_name}")


def _exited(move: Move, event: ev.WorkerExited) -> None:
    """In RUNNING, RESTORING, STOPPING and COLLECTING."""
    known = move.worker(event.worker)
    if known is None:
        return
    move.know(event.step, event.persisted_step)
    member = move.member(event.worker)
    if member is None:
        _lose_extra(move, event, known)
        return
    if known.status is Status.RESTORED and _is_beyond_cut(move, event.step):
        _count_step(move, event.step)
    if not known.killed:
        move.fault(
            FaultKind.DIED,
            event.worker,
            event.step,
            began_s=event.began_s,
            status=event.status,
            note=event.note,
            error=event.error,
        )
    move.drop([event.worker])
    phase = move.state.phase
    if phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"rank {member.rank} {describe_status(event.status)}")
    elif phase is Phase.COLLECTING and not known.killed:
        count(move, move.state.faults[-1:])
        move.set(root_cause=move.state.root_cause or root_cause(move.state.faults))


def _lose_extra(move: Move, event: ev.WorkerExited, known: WorkerState) -> None:
    """A spare, or a replacement that has no rank yet, is gone: a line in the log, and another."""
    move.drop([event.worker])
    if known.killed:
        return
    move.why(f"{event.worker} without a rank {describe_status(event.status)}")
    if known.slot is None:
        move.set(num_spare_deaths=move.state.num_spare_deaths + 1)
        if move.state.phase is Phase.RUNNING:
            staff(move, event.worker.node)
    else:
        deaths = {**move.state.deaths, known.slot: move.state.deaths.get(known.slot, 0) + 1}
        move.set(deaths=deaths)
        if deaths[known.slot] >= move.state.config.max_deaths_per_slot:
            exclude(move, [known.slot])
        if move.state.phase is Phase.RUNNING:
            staff(move, event.worker.node)


def _exited_forming(move: Move, event: ev.WorkerExited) -> None:
    known = move.worker(event.worker)
    if known is None:
        return
    move.know(event.step, event.persisted_step)
    if move.member(event.worker) is None:
        _lose_extra(move, event, known)
        return
    if known.killed or (event.status == 0 and not move.state.decorated):
        move.drop([event.worker])
        return
    move.fault(
        FaultKind.DIED,
        event.worker,
        event.step,
        began_s=event.began_s,
        status=event.status,
        note=event.note,
        error=event.error,
    )
    move.set(root_cause=root_cause(move.state.faults))
    move.drop([event.worker])
    if move.state.decorated:
        count(move, move.state.faults[-1:])
        if event.status == 0:
            move.why("exit code 0 before main() was called is a failure")
    else:
        rank = move.state.faults[-1].rank
        terminate_group(move, 15, f"rank {rank} {describe_status(event.status)}")


def _exited_closed(move: Move, event: ev.WorkerExited) -> None:
    known = move.worker(event.worker)
    if known is None:
        return
    member = move.member(event.worker)
    move.drop([event.worker])
    failed = event.status != 0 and not known.killed and member is not None
    if failed and move.state.outcome is Outcome.DONE:
        move.fault(
            FaultKind.DIED,
            event.worker,
            event.step,
            status=event.status,
            note="after main() had returned",
            error=event.error,
        )
        _fail_closed(move)


def _fail_closed(move: Move) -> None:
    """Training is done, and one script failed after it: its peers end as under any launcher."""
    move.set(outcome=Outcome.SCRIPT_FAILED, root_cause=move.state.faults[-1])
    for worker in move.living():
        move.do(ev.TerminateWorker(worker))
    move.enter(Phase.CLOSED, move.state.config.grace_s)


def _hung_closed(move: Move, event: ev.WorkersHung) -> None:
    """Told that every rank has finished, and these do not return from main()."""
    known = ((worker, move.worker(worker)) for worker in event.workers)
    living = [worker for worker, k in known if k and not k.killed]
    if not move.current(event.generation) or move.state.outcome is not Outcome.DONE or not living:
        return
    move.do(ev.DumpStacks(tuple(living)))
    details = {"began_s": event.began_s, "status": SIGKILL_STATUS, "note": event.note}
    move.faults(FaultKind.HUNG, living, event.step, **details)
    move.kill(living, "does not return from main()")
    _fail_closed(move)


def _hung(move: Move, event: ev.WorkersHung) -> None:
    if not move.current(event.generation) or not event.workers:
        return
    roster = move.state.roster
    move.know(event.step)
    if _is_beyond_cut(move, event.step):
        _count_step(move, event.step)
    move.fault(FaultKind.HUNG, event.workers[0], event.step, began_s=event.began_s, note=event.note)
    move.do(ev.DumpStacks(tuple(move.workers(roster.alive & ~roster.killed))))
    # A stopped process cannot come out: waiting for it would only cost the others time. If nobody
    # else may hold the state, it is given the last holder's time all the same.
    inside = move.inside()
    stopped = move.bits(event.stopped) & inside
    if stopped and stopped != inside:
        kill_hung(move, stopped, "stopped")
    abort(move, "no progress for the hang timeout")


def _hung_forming(move: Move, event: ev.WorkersHung) -> None:
    known = ((w, move.worker(w)) for w in event.workers)
    living = [w for w, k in known if k and not k.killed and k.status is Status.STARTING]
    if not move.current(event.generation) or not living:
        return
    move.fault(FaultKind.HUNG, living[0], 0, began_s=event.began_s, note=event.note)
    move.set(root_cause=root_cause(move.state.faults))
    move.do(ev.DumpStacks(tuple(living)))
    if not move.state.decorated:
        terminate_group(move, 15, "no progress for the hang timeout")
        return
    kill_late(move, living, "hung before it reached the decorator")


# ---------------------------------------------------------------- asked to stop


def _drain(move: Move, event: ev.DrainRequested) -> None:
    if move.state.draining is not None and not event.force:
        return
    first = move.state.draining is None
    if first:
        drain_by_s = move.now_s + move.state.config.grace_s
        move.set(draining=event.signum, drain_by_s=drain_by_s)
    if event.force:
        decorated = move.state.decorated
        outcome = move.state.outcome or (Outcome.DRAINED if decorated else Outcome.SIGNALLED)
        move.kill(move.living(), "asked to stop twice")
        move.set(outcome=outcome, persisting=None)
        move.enter(Phase.CLOSED, move.state.config.kill_timeout_s)
        move.why("asked to stop twice: killing everything")
    elif move.state.phase is Phase.FORMING and move.state.decorated:
        end(move, Outcome.DRAINED, f"asked to stop by signal {event.signum}")
    elif move.state.phase is Phase.FORMING:
        terminate_group(move, event.signum, f"asked to stop by signal {event.signum}")
    elif move.state.phase in (Phase.RUNNING, Phase.RESTORING):
        abort(move, f"asked to stop by signal {event.signum}")
    elif move.state.phase is Phase.COLLECTING and move.state.outcome is None:
        end(move, Outcome.DRAINED, f"asked to stop by signal {event.signum}")
    elif move.state.phase is Phase.CLOSED and move.state.deadline_s is None:
        move.set(outcome=Outcome.SIGNALLED)  # trained to the end, but not run to its end
        for worker in move.living():
            move.do(ev.TerminateWorker(worker, event.signum))
        move.enter(Phase.CLOSED, move.state.config.grace_s)


def _alike(move: Move, event: ev.Alike) -> None:
    """Each of these ranks, as if it had said so itself, and all at once."""
    TABLE[type(event.event)][move.state.phase](move, event)


# ---------------------------------------------------------------- the table

_ORDER = tuple(Phase)  # forming, running, stopping, collecting, restoring, closed


def _row(*handlers: Handler) -> dict[Phase, Handler]:
    assert len(handlers) == len(_ORDER)
    return dict(zip(_ORDER, handlers, strict=True))


def _always(handler: Handler) -> dict[Phase, Handler]:
    return _row(*[handler] * len(_ORDER))


_no: Handler = _ignore

# fmt: off
TABLE: dict[type[Any], dict[Phase, Handler]] = {
    #   forming       running       stopping      collecting    restoring     closed
    ev.NodeJoined: _row(
        _node_joined, _node_joined, _node_joined, _node_joined, _node_joined, _no),
    ev.NodeLeft: _always(_node_left),
    ev.StoreOpened: _always(_store_opened),
    ev.WorkerReady: _row(
        _ready,       _ready,       _ready,       _ready,       _ready,       _no),
    ev.WorkerJoined: _row(
        _no,          _no,          _no,          _no,          _joined,      _no),
    ev.WorkerRestored: _row(
        _no,          _no,          _no,          _no,          _restored,    _no),
    ev.WorkerStepped: _row(
        _no,          _stepped,     _stepped,     _stepped,     _stepped,     _no),
    ev.WorkerFinished: _row(
        _finished,    _finished,    _finished,    _finished,    _finished,    _no),
    ev.WorkerInterrupted: _row(
        _interrupted, _interrupted, _interrupted, _interrupted, _interrupted, _no),
    ev.WorkerFailed: _row(
        _failed,      _failed,      _failed,      _failed,      _failed,      _no),
    ev.WorkerExited: _row(
        _exited_forming, _exited,   _exited,      _exited,      _exited,      _exited_closed),
    ev.WorkersHung: _row(
        _hung_forming, _hung,       _no,          _no,          _hung,        _hung_closed),
    ev.WorkerSlow: _always(_no),
    ev.PaceMeasured: _always(_pace),
    ev.HealthCheckFailed: _row(
        _health,      _health,      _health,      _health,      _health,      _no),
    ev.Persisted: _row(
        _persisted,   _no,          _no,          _persisted,   _no,          _no),
    ev.DrainRequested: _always(_drain),
    ev.TimePassed: _always(_no),
    ev.Alike: _always(_alike),
}
# fmt: on
