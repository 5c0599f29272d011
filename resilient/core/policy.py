"""What a fault leads to: root cause, verdict, and who is in the next generation.

The table of the design, as pure functions over the coordinator's state. The coordinator asks when
every rank has reported or is dead, never before: with half of the reports, a collateral error looks
like a cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from resilient.core.model import (
    Fault,
    FaultKind,
    Member,
    Outcome,
    Phase,
    Slot,
    State,
    Status,
    Worker,
    WorkerState,
)

CONFIG_ERROR = "resilient.errors.ConfigError"

_DEATHS = (FaultKind.NODE_LOST, FaultKind.DIED)


def root_cause(faults: Sequence[Fault]) -> Fault | None:
    """The fault the others followed from.

    A death first (its peers see broken connections, often before anything else is known), then a
    hang (of a rank that had to be killed before one that came out), then the earliest exception of
    the user's own code, then the earliest broken collective.
    """

    def order(indexed: tuple[int, Fault]) -> tuple[int, int]:
        index, fault = indexed
        if fault.kind in _DEATHS:
            return 0, index
        if fault.kind is FaultKind.HUNG:
            return (1 if fault.status is not None else 2), index
        return (3 if fault.kind is FaultKind.RAISED else 4), index

    return min(enumerate(faults), key=order)[1] if faults else None


@dataclass(frozen=True)
class Verdict:
    """What follows from the faults of one generation.

    Attributes:
        state: with deaths, errors, barren generations and exclusions counted.
        outcome: how the job ends; None: it goes on.
        excluded: slots excluded by this verdict, ascending.
    """

    state: State
    outcome: Outcome | None
    reason: str
    excluded: tuple[Slot, ...] = ()


def judge(state: State) -> Verdict:
    """Judges the generation that has just ended, by `state.faults`."""
    cause = root_cause(state.faults)
    state = replace(state, root_cause=cause)
    if state.draining is not None:
        return Verdict(state, Outcome.DRAINED, f"asked to stop by signal {state.draining}")
    if cause is not None and cause.kind is FaultKind.RAISED and cause.error is not None:
        if cause.error.type_name == CONFIG_ERROR:
            return Verdict(state, Outcome.MISCONFIGURED, "the train function must be changed")
        key = (cause.step, cause.error.type_name, cause.error.frame)
        if key in state.errors_seen:
            return Verdict(
                state,
                Outcome.TRAIN_FUNCTION_FAILED,
                f"{cause.error.type_name} again at step {cause.step}, at {cause.error.frame}",
            )
        state = replace(state, errors_seen=state.errors_seen | {key})

    state, excluded = count_deaths(state, state.faults)
    num_barren = 0 if state.stepped else state.num_barren + 1
    if excluded:  # another membership: its own chance
        num_barren = 0
    state = replace(state, num_barren=num_barren)
    if num_barren >= state.config.max_barren_generations:
        return Verdict(
            state,
            Outcome.UNRECOVERABLE,
            f"no step was committed in {num_barren} generations in a row",
            excluded,
        )
    what = f"{cause.kind.value}, rank {cause.rank}" if cause else "interrupted"
    return Verdict(state, None, f"going on after: {what}", excluded)


def count_deaths(state: State, faults: Sequence[Fault]) -> tuple[State, tuple[Slot, ...]]:
    """Counts deaths a slot; the third one without a committed step excludes it.

    A rank that had to be killed because it hung counts as dead.
    """
    deaths = dict(state.deaths)
    excluded = []
    for fault in faults:
        slot = _slot_of(state, fault.worker)
        died = fault.kind is FaultKind.DIED or (
            fault.kind is FaultKind.HUNG and fault.status is not None
        )
        if slot is None or not died:
            continue
        deaths[slot] = deaths.get(slot, 0) + 1
        if deaths[slot] >= state.config.max_deaths_per_slot and slot not in state.excluded:
            excluded.append(slot)
    state = replace(state, deaths=deaths, excluded=state.excluded | frozenset(excluded))
    return state, tuple(sorted(set(excluded)))


def _slot_of(state: State, worker: Worker) -> Slot | None:
    if state.plan is not None:
        for member in state.plan.members:
            if member.worker == worker:
                return member.slot
    known = state.workers.get(worker)
    return known.slot if known else None


@dataclass(frozen=True)
class Membership:
    """Who would be in the next generation, as far as it is known now.

    Attributes:
        members: complete and ready, in rank order, when `waiting_for` is empty.
        waiting_for: slots that have no ready worker yet, ascending.
        to_start: of those, the ones for which not even a starting worker is there.
        spares_used: spares that take a slot.
        dropped: slots the world loses.
    """

    members: tuple[Member, ...]
    waiting_for: tuple[Slot, ...]
    to_start: tuple[Slot, ...]
    dropped: tuple[Slot, ...]


def choose_members(state: State, *, give_up_waiting: bool = False) -> Membership:
    """Fills the slots of the last plan with living workers.

    A survivor keeps its slot and, unless the world shrinks below it, its rank. A dead one's slot
    and rank go to a ready spare of the same node, else to a worker that is starting. When the world
    shrinks, the highest ranks fill the holes.

    Args:
        give_up_waiting: drop the slots that have no ready worker (the rendezvous timed out).
    """
    assert state.plan is not None
    replace_dead = state.config.replace or state.phase is Phase.FORMING
    filled: dict[int, tuple[Slot, Worker]] = {}
    holes: list[tuple[int, Slot]] = []
    starting: list[tuple[int, Slot]] = []
    dropped: list[Slot] = []
    for rank, slot, worker in ((m.rank, m.slot, m.worker) for m in state.plan.members):
        known = state.workers.get(worker)
        if slot in state.excluded or slot.node not in state.nodes:
            dropped.append(slot)
        elif known is not None and not known.killed:
            if known.status in (Status.READY, Status.FINISHED):
                filled[rank] = (slot, worker)
            else:
                starting.append((rank, slot))
        elif replace_dead:
            holes.append((rank, slot))
        else:
            dropped.append(slot)

    taken = {member.worker for member in state.plan.members}
    extra = {w: s for w, s in sorted(state.workers.items()) if w not in taken and not s.killed}
    waiting_for = [slot for _, slot in starting]
    to_start: list[Slot] = []
    for rank, slot in holes:
        substitute = _take(extra, slot, ready=True)
        if substitute is not None:
            filled[rank] = (slot, substitute)
            continue
        waiting_for.append(slot)
        if _take(extra, slot, ready=False) is None:
            to_start.append(slot)
    if give_up_waiting:
        dropped += waiting_for
        waiting_for, to_start = [], []
    return Membership(
        members=_dense(filled),
        waiting_for=tuple(sorted(waiting_for)),
        to_start=tuple(sorted(to_start)),
        dropped=tuple(sorted(dropped)),
    )


def _take(extra: dict[Worker, WorkerState], slot: Slot, *, ready: bool) -> Worker | None:
    """Takes the best worker for the slot out of `extra`: made for it, else a spare of its node."""
    best = None
    for worker, known in extra.items():
        if (known.status is Status.READY) is not ready or worker.node != slot.node:
            continue
        if known.slot == slot:
            best = worker
            break
        if best is None and known.slot is None:
            best = worker
    if best is not None:
        del extra[best]
    return best


def _dense(filled: Mapping[int, tuple[Slot, Worker]]) -> tuple[Member, ...]:
    """Ranks 0..n-1: whoever is below n keeps its rank, the highest fill the holes."""
    ranks = dict(filled)
    world_size = len(ranks)
    for hole in [rank for rank in range(world_size) if rank not in ranks]:
        ranks[hole] = ranks.pop(max(ranks))
    return tuple(Member(rank, *ranks[rank]) for rank in sorted(ranks))
