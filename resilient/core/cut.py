"""The cut: from which step a generation resumes, and who holds that step.

After an interruption every survivor says what it holds. Ranks that are one step ahead of others, or
behind, are normal: a collective that was severed may have completed on one rank and not on the
next. So the step is computed from what is there, never assumed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from resilient.core.model import Cut, CutKind, Group, Holding, Member, Worker
from resilient.core.ranks import bit, iterate


def find_cut(
    members: Sequence[Member],
    holdings: Mapping[Worker, Sequence[Holding]],
    *,
    committed_step: int,
    persisted_step: int | None,
) -> Cut | None:
    """The newest step that can be recovered, for data-parallel replicas (each holds everything).

    Args:
        members: of the generation to come, in rank order.
        holdings: what each living worker reported; a worker without an entry holds nothing.
        committed_step: newest step that any rank, dead ones included, is known to have committed.
        persisted_step: newest complete checkpoint on disk, or None.
    Returns:
        None when steps were committed and no copy of any is left.
    Invariant: the step is the maximum over all copies; memory is preferred to disk at equal steps.
    """
    groups = [(bit(m.rank), tuple(holdings.get(m.worker, ()))) for m in members]
    return newest_cut(groups, committed_step=committed_step, persisted_step=persisted_step)


def newest_cut(
    held: Iterable[Group], *, committed_step: int, persisted_step: int | None
) -> Cut | None:
    """As `find_cut`, for what is held by whole sets of ranks of the generation to come."""
    by_step: dict[int, int] = {}
    for ranks, holdings in held:
        for holding in holdings:
            by_step[holding.step] = by_step.get(holding.step, 0) | ranks
    newest = max(by_step, default=None)
    if newest is not None and (persisted_step is None or newest >= persisted_step):
        return Cut(CutKind.MEMORY, newest, tuple(iterate(by_step[newest])))
    if persisted_step is not None:
        return Cut(CutKind.DISK, persisted_step)
    if committed_step == 0:
        return Cut(CutKind.INITIAL, 0)
    return None


def source_of(cut: Cut, rank: int, world_size: int) -> int | None:
    """The rank that sends the state to `rank`, or None when it holds the cut itself.

    Raises:
        ValueError: the cut is not in memory, or the world has no such rank.
    """
    if not cut.holders:
        raise ValueError("only a cut in memory has sources")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    num_holders_before = bisect_left(cut.holders, rank)
    if cut.holders[num_holders_before : num_holders_before + 1] == (rank,):
        return None
    receiver = rank - num_holders_before  # all others receive, in ascending order
    return cut.holders[receiver % len(cut.holders)]
