"""The cut: from which step a generation resumes, and who holds that step.

After an interruption every survivor says what it holds. Ranks that are one step ahead of others, or
behind, are normal: a collective that was severed may have completed on one rank and not on the
next. So the step is computed from what is there, never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilient.core.model import Cut, CutKind, Holding, Member, Worker


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
    held = {
        member.rank: {holding.step for holding in holdings.get(member.worker, ())}
        for member in members
    }
    newest = max((step for steps in held.values() for step in steps), default=None)
    if newest is not None and (persisted_step is None or newest >= persisted_step):
        holders = tuple(sorted(rank for rank, steps in held.items() if newest in steps))
        return Cut(CutKind.MEMORY, newest, holders)
    if persisted_step is not None:
        return Cut(CutKind.DISK, persisted_step)
    if committed_step == 0:
        return Cut(CutKind.INITIAL, 0)
    return None


def source_of(cut: Cut, rank: int, world_size: int) -> int | None:
    """The rank that sends the state to `rank`, or None when it holds the cut itself.

    Raises:
        ValueError: the cut is not in memory.
    """
    if not cut.holders:
        raise ValueError("only a cut in memory has sources")
    if rank in cut.holders:
        return None
    receivers = [other for other in range(world_size) if other not in cut.holders]
    return cut.holders[receivers.index(rank) % len(cut.holders)]
