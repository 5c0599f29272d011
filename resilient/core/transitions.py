"""What depends on everybody: the transitions between phases, each in one place.

`advance` runs after every event and takes every transition whose condition holds: all ranks have
reported, a replacement is there for every hole, all are restored, a bound is over. Handlers of
single events (coordinator.py) only record and, where it does not depend on others, react.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from resilient.core import events as ev
from resilient.core.cut import find_cut
from resilient.core.model import (
    CutKind,
    Fault,
    FaultKind,
    Member,
    Outcome,
    Phase,
    Plan,
    Slot,
    Status,
    Worker,
    WorkerState,
)
from resilient.core.move import Move
from resilient.core.policy import choose_members, count_deaths, judge

MAX_SPARE_DEATHS = 3
SIGKILL_STATUS = -9


def terminate_group(move: Move, signum: int, reason: str) -> None:
    """Unmodified script: every process is asked to end, killed when its grace is over."""
    for worker in move.living():
        move.do(ev.TerminateWorker(worker, signum))
    move.enter(Phase.STOPPING, move.state.config.grace_s)
    move.why(reason)


def abort(move: Move, reason: str) -> None:
    assert move.state.plan is not None
    inside = tuple(move.inside())
    if inside:
        move.do(ev.AbortGeneration(move.state.plan.generation, inside, reason))
    bound_s = max(move.state.config.interrupt_timeout_s, 3 * (move.state.usual_step_s or 0.0))
    move.set(extended=False)
    move.enter(Phase.STOPPING, bound_s)
    move.why(reason)


def count(move: Move, faults: Iterable[Fault]) -> None:
    state, excluded = count_deaths(move.state, tuple(faults))
    move.set(deaths=state.deaths)
    exclude(move, excluded)


def exclude(move: Move, slots: Iterable[Slot]) -> None:
    for slot in slots:
        move.set(excluded=move.state.excluded | {slot})
        died = move.state.deaths.get(slot, 0)
        move.do(ev.ExcludeSlot(slot, f"{died} deaths without a committed step"))


def refill_spares(move: Move) -> None:
    if move.state.num_spare_deaths >= MAX_SPARE_DEATHS or not move.state.config.replace:
        return
    for node in sorted(move.state.nodes):
        have = sum(1 for w in move.living() if w.node == node and not move.member(w))
        for _ in range(move.state.config.num_spares - have):
            move.launch(None, node)


def advance(move: Move) -> None:
    """Takes every transition whose condition holds now. Each leads to a later phase, or waits."""
    while True:
        before = move.state
        _ADVANCE[move.state.phase](move)
        if move.state.phase is before.phase or move.state.finished:
            return


def _advance_forming(move: Move) -> None:
    state = move.state
    if state.plan is None:
        store = state.stores.get(state.num_restarts)
        if store is not None and state.nodes:
            _form(move, store)
    elif state.decorated:
        if move.expired:
            late = [w for w in move.living(Status.STARTING) if move.state.workers[w].slot]
            kill_late(move, late, "not at the decorator in time")
            move.enter(Phase.FORMING, state.config.start_timeout_s)
        _try_plan(move)
    elif not any(move.member(w) for w in state.workers):
        close(move, Outcome.DONE, "every process of the script has ended with exit code 0")


def kill_late(move: Move, workers: Iterable[Worker], reason: str) -> None:
    """Kills workers that do not reach the decorator; each counts as a death of its slot."""
    for worker in workers:
        note = {"status": SIGKILL_STATUS, "note": reason}
        move.fault(FaultKind.HUNG, worker, 0, **note)
        move.kill(worker, reason)
        count(move, move.state.faults[-1:])


def _form(move: Move, store: tuple[str, int]) -> None:
    """The first plan: a worker in every slot, ranks in the order of nodes and slots."""
    slots = [
        slot
        for node, num_slots in sorted(move.state.nodes.items())
        for slot in (Slot(node, local_rank) for local_rank in range(num_slots))
        if slot not in move.state.excluded
    ]
    if len(slots) < move.state.config.min_world_size:
        close(move, Outcome.UNRECOVERABLE, f"{len(slots)} slots are left")
        return
    members = tuple(
        Member(rank, slot, move.start(slot, slot.node)) for rank, slot in enumerate(slots)
    )
    cut = find_cut((), {}, committed_step=0, persisted_step=None)
    assert cut is not None
    move.set(plan=Plan(move.state.num_restarts, members, store, cut))
    for member in members:
        move.do(
            ev.StartWorker(member.worker, member.slot, move.state.plan, move.state.num_restarts)
        )
    move.why(f"starting {len(members)} workers")


def _advance_stopping(move: Move) -> None:
    if not move.state.decorated:
        _advance_stopping_script(move)
        return
    inside = move.inside()
    if not inside and not any(
        known.killed and move.member(worker) for worker, known in move.state.workers.items()
    ):
        _decide(move)
    elif move.expired:
        _enforce(move, inside)


def _enforce(move: Move, inside: list[Worker]) -> None:
    """The bound of STOPPING is over: those still inside are killed; the killed count as gone."""
    config = move.state.config
    if not inside:
        for worker in [w for w, known in sorted(move.state.workers.items()) if known.killed]:
            member = move.member(worker)
            if member is not None:
                move.do(ev.ExcludeSlot(member.slot, "its process does not end after SIGKILL"))
                move.set(excluded=move.state.excluded | {member.slot})
                move.drop(worker)
        _decide(move)
        return
    held = any(known.holdings for w, known in move.state.workers.items() if w not in inside)
    may_extend = not (held or move.state.extended or move.drain_is_over)
    if may_extend and move.state.committed_step > 0:
        move.set(extended=True)
        move.enter(Phase.STOPPING, config.last_holder_timeout_s)
        move.why("the last ranks to hold the state get more time")
        return
    move.do(ev.DumpStacks(tuple(inside)))
    for worker in inside:
        kill_hung(move, worker, "did not leave its generation in time")
    move.enter(Phase.STOPPING, config.kill_timeout_s)
    move.why(f"killing {len(inside)} ranks that did not come out")


def kill_hung(move: Move, worker: Worker, why: str) -> None:
    """Kills a rank that cannot or does not come out. What was seen of the hang stays with it."""
    seen = next((fault for fault in move.state.faults if fault.kind is FaultKind.HUNG), None)
    move.fault(
        FaultKind.HUNG,
        worker,
        move.state.committed_step,
        began_s=seen.began_s if seen else None,
        status=SIGKILL_STATUS,
        note="; ".join(filter(None, (why, seen.note if seen else ""))),
    )
    move.kill(worker, why)


def _advance_stopping_script(move: Move) -> None:
    """Unmodified script: all gone, then the whole group again or the end."""
    state = move.state
    if state.workers:
        if move.expired:
            if move.living():
                for worker in move.living():
                    move.kill(worker, "its grace is over")
                move.enter(Phase.STOPPING, state.config.kill_timeout_s)
            else:  # SIGKILL does not take: nothing of ours can end these
                move.set(workers={})
        if move.state.workers:
            return
    if state.draining is not None:
        close(move, Outcome.SIGNALLED, f"asked to stop by signal {state.draining}")
    elif state.num_restarts < state.config.max_restarts:
        move.set(num_restarts=state.num_restarts + 1, plan=None, faults=())
        move.do(ev.OpenStore(move.state.num_restarts))
        move.enter(Phase.FORMING)
        move.why(f"restart {move.state.num_restarts} of {state.config.max_restarts}")
    else:
        close(move, Outcome.SCRIPT_FAILED, "a process of the script failed")


def _decide(move: Move) -> None:
    """Everyone has reported or is dead: root cause, verdict, and on to the next membership."""
    verdict = judge(move.state)
    move.state = verdict.state
    exclude(move, verdict.excluded)
    move.enter(Phase.COLLECTING, move.state.config.rendezvous_timeout_s)
    if verdict.outcome is None:
        move.why(verdict.reason)
    else:
        end(move, verdict.outcome, verdict.reason)


def _advance_collecting(move: Move) -> None:
    if move.state.outcome is None:
        _try_plan(move)
        return
    holder = move.state.persisting
    if holder is not None and (move.worker(holder) is None or move.expired):
        move.set(persisting=None)
        end(move, move.state.outcome, move.state.outcome_reason, given_up=move.expired)


def _try_plan(move: Move) -> None:
    """Publishes the next plan when every slot has a ready worker, or the wait for it is over."""
    if move.expired:  # whoever was late once already is stuck, and would be waited for each time
        for worker in move.living(Status.STARTING):
            if move.state.workers[worker].slot is None:
                move.kill(worker, "not at the decorator in time")
    state = move.state
    assert state.plan is not None
    chosen = choose_members(state, give_up_waiting=move.expired)
    size = len(chosen.members) + len(chosen.waiting_for)
    if size < state.config.min_world_size or size == 0:
        least = state.config.min_world_size
        end(
            move,
            Outcome.UNRECOVERABLE,
            f"{size} ranks can go on, fewer than the minimum of {least}",
        )
        return
    cut = find_cut(
        chosen.members,
        move.holdings(),
        committed_step=state.committed_step,
        persisted_step=state.persisted_step,
    )
    # A job that persists may learn of a checkpoint from a worker that is still to come.
    if cut is None and not (chosen.waiting_for and state.config.persists):
        end(
            move,
            Outcome.UNRECOVERABLE,
            f"no copy of step {state.committed_step} is left, in memory or on disk: every rank "
            "died or was changing its state (a collective between optimizer.step() and the next "
            "batch belongs in job.section); --checkpoint-dir would have kept one",
        )
        return
    for slot in chosen.to_start:
        move.launch(slot, slot.node)
    if chosen.waiting_for:
        if chosen.to_start:
            move.why(f"starting workers for {len(chosen.to_start)} slots")
        return
    forming = state.phase is Phase.FORMING
    generation = state.plan.generation + (0 if forming else 1)
    store = state.stores.get(generation)
    if store is None:
        if move.expired:
            end(move, Outcome.UNRECOVERABLE, "no store could be opened for the next generation")
        return
    assert cut is not None  # nothing is waited for
    first_world_size = state.plan.first_world_size or len(chosen.members)
    _publish(move, Plan(generation, chosen.members, store, cut, first_world_size))


def _publish(move: Move, plan: Plan) -> None:
    extra = [w for w in move.living() if plan.rank_of(w) is None]
    for worker in extra:  # came too late for its slot, or has lost it
        if move.state.workers[worker].slot in move.state.excluded:
            move.kill(worker, "its slot is excluded")
        else:
            move.change(worker, slot=None)  # a spare now
    workers = dict(move.state.workers)
    for member in plan.members:
        workers[member.worker] = WorkerState(Status.ENTERED, member.slot, plan.generation)
    stores = {g: s for g, s in move.state.stores.items() if g > plan.generation}
    move.set(plan=plan, workers=workers, stores=stores, stepped=False, faults=())
    if plan.cut.kind is not CutKind.INITIAL:
        move.know(plan.cut.step)
    move.do(ev.PublishPlan(plan), ev.StartGeneration(plan), ev.OpenStore(plan.generation + 1))
    move.enter(Phase.RESTORING)
    move.why(f"generation {plan.generation}: {plan.world_size} ranks from step {plan.cut.step}")


def _advance_restoring(move: Move) -> None:
    assert move.state.plan is not None
    waiting = (Status.ENTERED, Status.JOINED)
    if not any(move.state.workers[m.worker].status in waiting for m in move.state.plan.members):
        move.enter(Phase.RUNNING)
        move.set(num_spare_deaths=0)
        refill_spares(move)
        move.why("every rank is restored")


def _advance_running(move: Move) -> None:
    assert move.state.plan is not None
    known = [move.worker(member.worker) for member in move.state.plan.members]
    if all(k is not None and k.status is Status.FINISHED for k in known):
        close(move, Outcome.DONE, "every rank has finished")


# ---------------------------------------------------------------- the end


def end(move: Move, outcome: Outcome, reason: str, *, given_up: bool = False) -> None:
    """The job ends with this outcome; first, what memory holds beyond the disk goes there."""
    move.set(outcome=outcome, outcome_reason=reason)
    held = [
        (holding.step, worker)
        for worker, holdings in sorted(move.holdings().items())
        for holding in holdings
    ]
    newest = max((step for step, _ in held), default=0)
    given_up = given_up or move.drain_is_over
    if move.state.config.persists and not given_up and newest > (move.state.persisted_step or 0):
        holder = next(worker for step, worker in held if step == newest)
        move.set(persisting=holder)
        move.do(ev.Persist(holder, newest))
        move.enter(Phase.COLLECTING, move.state.config.grace_s)
        move.why(f"{reason}; writing step {newest} to disk")
        return
    close(move, outcome, reason)


def close(move: Move, outcome: Outcome, reason: str) -> None:
    """Lets everybody go; the end comes when all processes are gone."""
    move.set(outcome=outcome, outcome_reason=reason)
    listening: list[Worker] = []
    others: list[Worker] = []
    for worker in move.living():
        known = move.state.workers[worker]
        waits = known.status in (Status.READY, Status.FINISHED) and not move.drain_is_over
        (listening if waits and move.member(worker) else others).append(worker)
    for worker in others:
        move.kill(worker, "the job has ended")
    if outcome is Outcome.DONE:
        if listening:
            move.do(ev.Close(tuple(listening)))
        move.enter(Phase.CLOSED)
    else:
        if listening:
            move.do(ev.Stop(tuple(listening), outcome, reason))
        config = move.state.config
        move.enter(Phase.CLOSED, config.grace_s if listening else config.kill_timeout_s)
    move.why(reason)


def _advance_closed(move: Move) -> None:
    if move.state.workers and not move.living() and move.state.deadline_s is None:
        move.enter(Phase.CLOSED, move.state.config.kill_timeout_s)  # scripts are done; spares die
    if move.state.workers and move.expired:
        if move.living():
            for worker in move.living():
                move.kill(worker, "its grace is over")
            move.enter(Phase.CLOSED, move.state.config.kill_timeout_s)
        else:
            move.set(workers={})
            move.why("some processes do not end after SIGKILL")
    if not move.state.workers:
        assert move.state.outcome is not None
        move.set(finished=True, deadline_s=None)
        cause = None if move.state.outcome is Outcome.DONE else move.state.root_cause
        move.do(ev.Finish(move.state.outcome, cause, move.state.outcome_reason))


_ADVANCE: dict[Phase, Callable[[Move], None]] = {
    Phase.FORMING: _advance_forming,
    Phase.RUNNING: _advance_running,
    Phase.STOPPING: _advance_stopping,
    Phase.COLLECTING: _advance_collecting,
    Phase.RESTORING: _advance_restoring,
    Phase.CLOSED: _advance_closed,
}
