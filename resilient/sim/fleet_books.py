"""What a fleet's plans are checked against: who is where, and what its ranks have said.

One idea: of 80,000 members few change from plan to plan, and who has not changed is the same
object. So only what differs is looked at, and what concerns everybody is done with sets of ranks
and of slots.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count

from resilient.core.model import Config, Cut, CutKind, Member, Plan, Slot, Worker
from resilient.core.ranks import Ranks, bit, from_ranks, full, has, iterate


@dataclass
class Generation:
    """The current generation as it really is.

    Attributes:
        state_of: the generation that gave those that hold the state now that state.
        holding: ranks that hold the state it resumes from: the cut's holders, then everybody.
        gone: their process has ended, whether the coordinator knows it or not.
        stuck: they do not come out.
        left: they have left their train function, or are on their way out.
        began_s: training since; stopped_s: no step completes any more since.
        told: what those that left have said: ranks, step held, the generation that made it so.
    """

    plan: Plan
    state_of: int
    holding: Ranks
    gone: Ranks
    stuck: Ranks = 0
    left: Ranks = 0
    began_s: float | None = None
    stopped_s: float | None = None
    told: list[tuple[Ranks, int, int]] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return self.stopped_s is None and not self.gone

    def step(self, now_s: float, step_s: float) -> int:
        """Committed steps, by now."""
        if self.began_s is None:
            return self.plan.cut.step
        until_s = now_s if self.stopped_s is None else self.stopped_s
        return self.plan.cut.step + int((until_s - self.began_s) / step_s)


class Books:
    """Who is where by the plans, and whether a plan is what it has to be.

    Attributes:
        rank_of: of the current plan's workers.
        dead: workers whose end the coordinator has been told.
        away: nodes whose leaving it has been told.
        kept: what living workers hold that lost their rank: step, and the generation it is of.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.members: tuple[Member, ...] = ()
        self.generation = -1
        self.rank_of: dict[Worker, int] = {}
        self.slots: set[Slot] = set()
        self.num_on: dict[str, int] = {}
        self.dead: set[Worker] = set()
        self.away: set[str] = set()
        self.excluded: set[Slot] = set()
        self.kept: dict[Worker, tuple[int, int]] = {}

    def enter(self, plan: Plan, last: Generation | None) -> tuple[Ranks, int]:
        """Checks a plan, and turns the page.

        Returns:
            The ranks that hold the state that it resumes from, and the generation that it is of.
        Raises:
            ValueError: the plan is not what it has to be.
        """
        if plan.generation <= self.generation:
            raise ValueError(f"generation {plan.generation} after {self.generation}")
        old, new = self.members, plan.members
        both = min(len(old), len(new))
        changed = list(compress(count(), map(operator.is_not, new, old)))
        leaving = [old[rank] for rank in (*changed, *range(both, len(old)))]
        coming = [new[rank] for rank in (*changed, *range(both, len(new)))]
        rank_before = {member.worker: member.rank for member in leaving}
        self._move(leaving, coming)
        if any(map(operator.ne, (new[rank].rank for rank in changed), changed)) or any(
            map(operator.ne, (member.rank for member in new[both:]), count(both))
        ):
            raise ValueError("ranks are not 0..n-1")
        self._check_members(plan)
        same = full(both) & ~from_ranks(changed)
        cut, state_of = self._expected_cut(last, same, coming, rank_before)
        if plan.cut != cut:
            raise ValueError(
                f"resumes from {plan.cut.kind.value} {plan.cut.step} with {len(plan.cut.holders)} "
                f"holders, where {len(cut.holders)} hold {cut.kind.value} {cut.step}"
            )
        self._keep(last, rank_before, cut.step)
        self.members, self.generation = new, plan.generation
        return from_ranks(cut.holders), state_of

    def _move(self, leaving: Sequence[Member], coming: Sequence[Member]) -> None:
        for member in leaving:
            del self.rank_of[member.worker]
            self.slots.remove(member.slot)
            self.num_on[member.slot.node] -= 1
            if not self.num_on[member.slot.node]:
                del self.num_on[member.slot.node]
        for member in coming:
            if member.slot in self.slots or member.worker in self.rank_of:
                raise ValueError(f"{member} shares its slot or its worker with another rank")
            if member.slot.node != member.worker.node:
                raise ValueError(f"{member} is not on its slot's node")
            self.rank_of[member.worker] = member.rank
            self.slots.add(member.slot)
            self.num_on[member.slot.node] = self.num_on.get(member.slot.node, 0) + 1

    def _check_members(self, plan: Plan) -> None:
        config = self.config
        if not config.min_nodes <= len(self.num_on) <= config.max_nodes:
            raise ValueError(f"{len(self.num_on)} nodes")
        if plan.world_size < config.min_world_size:
            raise ValueError(f"{plan.world_size} ranks")
        if not self.num_on.keys().isdisjoint(self.away):
            raise ValueError(f"is on {min(self.num_on.keys() & self.away)}, which has left")
        if not self.slots.isdisjoint(self.excluded):
            raise ValueError(f"is on {min(self.slots & self.excluded)}, which is excluded")
        if not self.rank_of.keys().isdisjoint(self.dead):
            raise ValueError(f"has {min(self.rank_of.keys() & self.dead)}, which is gone")

    def _expected_cut(
        self,
        last: Generation | None,
        same: Ranks,
        coming: Sequence[Member],
        rank_before: dict[Worker, int],
    ) -> tuple[Cut, int]:
        """The newest step that members of the new plan have said to hold, and all its holders."""
        held = [(ranks & same, step, of) for ranks, step, of in last.told] if last else []
        for member in coming:
            before = rank_before.get(member.worker)
            if before is not None and last is not None:
                told = next(((s, of) for ranks, s, of in last.told if has(ranks, before)), None)
            else:
                told = self.kept.get(member.worker)
            if told is not None:
                held.append((bit(member.rank), *told))
        held = [group for group in held if group[0]]
        if not held:
            return Cut(CutKind.INITIAL, 0), -1
        newest = max(step for _, step, _ in held)
        holders = 0
        for ranks, step, _ in held:
            holders |= ranks if step == newest else 0
        state_of = max(of for _, step, of in held if step == newest)
        return Cut(CutKind.MEMORY, newest, tuple(iterate(holders))), state_of

    def _keep(self, last: Generation | None, rank_before: dict[Worker, int], cut: int) -> None:
        """A copy beyond the cut is of a branch that nobody continues: it never counts again."""
        for worker, rank in rank_before.items():
            if worker in self.rank_of or worker in self.dead or last is None:
                continue
            for ranks, step, of in last.told:
                if has(ranks, rank):
                    self.kept[worker] = step, of
        self.kept = {
            worker: (step, of)
            for worker, (step, of) in self.kept.items()
            if step <= cut and worker not in self.rank_of and worker not in self.dead
        }
