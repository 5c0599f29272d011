"""One decision in the making: the state so far, the effects so far, and why.

The handlers and transitions write into a `Move`; what leaves the core is frozen again. It knows the
workers and the plan, and no rule. What concerns many members is said with sets of ranks; a single
worker is looked up by name, member or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from resilient.core import events as ev
from resilient.core.events import Effect
from resilient.core.model import (
    Fault,
    FaultKind,
    Group,
    Holding,
    Member,
    Phase,
    Roster,
    Slot,
    State,
    Status,
    Worker,
    WorkerState,
)
from resilient.core.ranks import Ranks, bit, from_ranks, has, iterate


class Move:
    """One step in the making: the state so far, the effects so far, why."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.reasons: list[str] = []
        self._extras: dict[Worker, WorkerState] | None = None  # this step's own copy

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def why(self, reason: str) -> None:
        self.reasons.append(reason)

    def enter(self, phase: Phase, timeout_s: float | None = None) -> None:
        deadline_s = None if timeout_s is None else self.now_s + timeout_s
        by_s = self.state.drain_by_s
        if deadline_s is not None and by_s is not None and self.now_s < by_s:
            deadline_s = min(deadline_s, by_s)  # no bound of a phase outlasts the grace of a drain
        self.set(phase=phase, deadline_s=deadline_s)

    @property
    def expired(self) -> bool:
        return self.state.deadline_s is not None and self.now_s >= self.state.deadline_s

    @property
    def drain_is_over(self) -> bool:
        """A drain was asked for, and its grace has passed: only kills from here on."""
        return self.state.drain_by_s is not None and self.now_s >= self.state.drain_by_s

    # ---------------------------------------------------------------- members, as sets of ranks

    def put(self, ranks: Ranks, status: Status, holdings: tuple[Holding, ...] = ()) -> None:
        self.set(roster=self.state.roster.put(ranks, status, holdings))

    def inside(self) -> Ranks:
        """Living members that are still in the current generation's train function."""
        return self.state.roster.inside & ~self.state.roster.killed

    def workers(self, ranks: Ranks) -> list[Worker]:
        """The members with these ranks, ascending by worker."""
        members = self.state.plan.members if self.state.plan else ()
        return sorted([members[rank].worker for rank in iterate(ranks)])

    def bits(self, workers: Iterable[Worker]) -> Ranks:
        """The ranks of those of these workers that are members."""
        ranks = (self.rank(worker) for worker in workers)
        return from_ranks([rank for rank in ranks if rank is not None])

    def held(self) -> list[Group]:
        """What the members that wait have reported, by rank; those told to die do not count."""
        roster = self.state.roster
        waiting = roster.waiting & ~roster.killed
        return [(ranks & waiting, what) for ranks, what in roster.holdings if ranks & waiting]

    # ---------------------------------------------------------------- workers, by name

    def member(self, worker: Worker) -> Member | None:
        plan, rank = self.state.plan, self.rank(worker)
        return None if plan is None or rank is None else plan.members[rank]

    def rank(self, worker: Worker) -> int | None:
        """Its rank in the plan. One whose node was lost and came back has none any more."""
        if self.state.plan is None or worker in self.state.extras:
            return None
        return self.state.plan.rank_of(worker)

    def worker(self, worker: Worker) -> WorkerState | None:
        """What is known of it; None: its process is gone, or never was."""
        rank = self.rank(worker)
        return self.state.extras.get(worker) if rank is None else self.state.member_state(rank)

    def living(self, *statuses: Status) -> list[Worker]:
        """Workers not told to die, ascending; of these statuses if any are given."""
        roster = self.state.roster
        ranks = 0
        for status in statuses or Status:
            ranks |= roster.of(status)
        extras = [
            worker
            for worker, known in self.state.extras.items()
            if not known.killed and (not statuses or known.status in statuses)
        ]
        return sorted([*self.workers(ranks & ~roster.killed), *extras])

    def change(self, worker: Worker, **changes: Any) -> None:
        """Of a member: status, holdings. Its slot and generation are the plan's."""
        rank = self.rank(worker)
        if rank is None:
            extras = self.own_extras()
            extras[worker] = replace(extras[worker], **changes)
        else:
            status = changes.pop("status")
            self.put(bit(rank), status, **changes)

    def drop(self, workers: Iterable[Worker]) -> None:
        """Their processes are gone."""
        ranks = []
        for worker in workers:
            rank = self.rank(worker)
            if rank is not None:
                ranks.append(rank)
            elif worker in self.state.extras:
                del self.own_extras()[worker]
        if ranks:
            self.set(roster=self.state.roster.without(from_ranks(ranks)))

    def drop_all(self) -> None:
        self.set(roster=Roster(lost=self.state.roster.lost), extras={})

    def own_extras(self) -> dict[Worker, WorkerState]:
        """The extras, to be written to: copied once a step, however many are changed."""
        if self._extras is None or self._extras is not self.state.extras:
            self._extras = dict(self.state.extras)
            self.set(extras=self._extras)
        return self._extras

    def launch(self, slot: Slot | None, node: str) -> None:
        """Starts a worker that has no rank, or none yet."""
        worker = Worker(node, self.state.next_number)
        self.own_extras()[worker] = WorkerState(slot=slot)
        self.set(next_number=worker.number + 1)
        self.do(ev.StartWorker(worker, slot, self.state.plan, self.state.num_restarts))

    def kill_ranks(self, ranks: Ranks, reason: str) -> None:
        """The same for members, by rank; ascending by worker."""
        fresh = ranks & ~self.state.roster.killed
        self.do(*(ev.KillWorker(worker, reason) for worker in self.workers(fresh)))
        roster = self.state.roster
        self.set(roster=replace(roster, killed=roster.killed | fresh))

    def kill(self, workers: Iterable[Worker], reason: str) -> None:
        """Kills those that have not been told to die already, in this order."""
        roster = self.state.roster
        ranks = []
        for worker in workers:
            rank = self.rank(worker)
            if rank is None:
                extras = self.own_extras()
                if extras[worker].killed:
                    continue
                extras[worker] = replace(extras[worker], killed=True)
            elif has(roster.killed, rank):
                continue
            else:
                ranks.append(rank)
            self.do(ev.KillWorker(worker, reason))
        if ranks:
            roster = self.state.roster
            self.set(roster=replace(roster, killed=roster.killed | from_ranks(ranks)))

    @property
    def anyone(self) -> bool:
        """Whether any process is left."""
        return bool(self.state.roster.alive or self.state.extras)

    @property
    def anyone_living(self) -> bool:
        """Whether any process is left that was not told to die."""
        roster = self.state.roster
        return bool(roster.alive & ~roster.killed) or any(
            not known.killed for known in self.state.extras.values()
        )

    # ---------------------------------------------------------------- faults and knowledge

    def usable(self, holdings: Iterable[Holding], generation: int) -> tuple[Holding, ...]:
        """Of what a worker reported of a generation: what the job still comes from."""
        named = (holding.of(generation) for holding in holdings)
        return tuple(holding for holding in named if self.state.is_continued(holding))

    def know(self, committed_step: int = 0, persisted_step: int | None = None) -> None:
        known = self.state.persisted_step
        if persisted_step is not None and (known is None or persisted_step > known):
            self.set(persisted_step=persisted_step)
        newest = max(self.state.committed_step, committed_step, self.state.persisted_step or 0)
        self.set(committed_step=newest)

    def fault(self, kind: FaultKind, worker: Worker, step: int, **details: Any) -> None:
        self.faults(kind, [worker], step, **details)

    def faults(self, kind: FaultKind, workers: Iterable[Worker], step: int, **details: Any) -> None:
        """The same fault of each of these workers, in this order."""
        self._faults(kind, ((self.rank(worker), worker) for worker in workers), step, details)

    def faults_of(self, kind: FaultKind, ranks: Ranks, step: int, **details: Any) -> None:
        """The same for members, by rank; ascending by worker."""
        members = self.state.plan.members if self.state.plan else ()
        found = sorted((members[rank].worker, rank) for rank in iterate(ranks))
        self._faults(kind, ((rank, worker) for worker, rank in found), step, details)

    def _faults(
        self,
        kind: FaultKind,
        whom: Iterable[tuple[int | None, Worker]],
        step: int,
        details: Mapping[str, Any],
    ) -> None:
        generation = self.state.plan.generation if self.state.plan else -1
        seen = [
            Fault(kind, worker, rank, generation, step, self.now_s, **details)
            for rank, worker in whom
        ]
        self.set(faults=(*self.state.faults, *seen))

    def current(self, generation: int) -> bool:
        return self.state.plan is not None and self.state.plan.generation == generation


def describe_status(status: int) -> str:
    """ "ended with exit code 1", "was killed by signal 9"."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
