"""What a fault leads to: root cause and verdict.

The table of the design, as pure functions over the coordinator's state. The coordinator asks when
every rank has reported or is dead, never before: with half of the reports, a collateral error looks
like a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from resilient.core.model import Fault, FaultKind, Outcome, Slot, State

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
        slot = _slot_of(state, fault)
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


def _slot_of(state: State, fault: Fault) -> Slot | None:
    known, plan = state.extras.get(fault.worker), state.plan
    if known is not None or plan is None:
        return known.slot if known else None
    current = fault.generation == plan.generation
    rank = fault.rank if current else plan.rank_of(fault.worker)
    return None if rank is None else plan.members[rank].slot
