"""One decision in the making: the state so far, the effects so far, and why.

The handlers and transitions write into a `Move`; what leaves the core is frozen again. It knows the
workers and the plan, and no rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilient.core import events as ev
from resilient.core.events import Effect
from resilient.core.model import (
    Fault,
    FaultKind,
    Holding,
    Member,
    Phase,
    Slot,
    State,
    Status,
    Worker,
    WorkerState,
)

INSIDE = (Status.ENTERED, Status.JOINED, Status.RESTORED)
"""In a generation, and due to report when it ends."""


class Move:
    """One step in the making: the state so far, the effects so far, why."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.reasons: list[str] = []

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

    # ---------------------------------------------------------------- workers

    def worker(self, worker: Worker) -> WorkerState | None:
        return self.state.workers.get(worker)

    def change(self, worker: Worker, **changes: Any) -> None:
        known = self.state.workers[worker]
        self.set(workers={**self.state.workers, worker: replace(known, **changes)})

    def drop(self, worker: Worker) -> None:
        self.set(workers={w: known for w, known in self.state.workers.items() if w != worker})

    def start(self, slot: Slot | None, node: str) -> Worker:
        worker = Worker(node, self.state.next_number)
        self.set(
            next_number=worker.number + 1,
            workers={**self.state.workers, worker: WorkerState(slot=slot)},
        )
        return worker

    def launch(self, slot: Slot | None, node: str) -> None:
        worker = self.start(slot, node)
        self.do(ev.StartWorker(worker, slot, self.state.plan, self.state.num_restarts))

    def kill(self, worker: Worker, reason: str) -> None:
        if not self.state.workers[worker].killed:
            self.change(worker, killed=True)
            self.do(ev.KillWorker(worker, reason))

    def living(self, *statuses: Status) -> list[Worker]:
        """Workers not told to die, ascending; of these statuses if any are given."""
        return [
            worker
            for worker, known in sorted(self.state.workers.items())
            if not known.killed and (not statuses or known.status in statuses)
        ]

    def member(self, worker: Worker) -> Member | None:
        for member in self.state.plan.members if self.state.plan else ():
            if member.worker == worker:
                return member
        return None

    def inside(self) -> list[Worker]:
        """Living members that are still in the current generation's train function."""
        return [w for w in self.living(*INSIDE) if self.member(w)]

    # ---------------------------------------------------------------- faults and knowledge

    def know(self, committed_step: int = 0, persisted_step: int | None = None) -> None:
        known = self.state.persisted_step
        if persisted_step is not None and (known is None or persisted_step > known):
            self.set(persisted_step=persisted_step)
        newest = max(self.state.committed_step, committed_step, self.state.persisted_step or 0)
        self.set(committed_step=newest)

    def fault(self, kind: FaultKind, worker: Worker, step: int, **details: Any) -> None:
        member = self.member(worker)
        fault = Fault(
            kind=kind,
            worker=worker,
            rank=member.rank if member else None,
            generation=self.state.plan.generation if self.state.plan else -1,
            step=step,
            seen_s=self.now_s,
            **details,
        )
        self.set(faults=(*self.state.faults, fault))

    def current(self, generation: int) -> bool:
        return self.state.plan is not None and self.state.plan.generation == generation

    def rank(self, worker: Worker) -> int | None:
        member = self.member(worker)
        return member.rank if member else None

    def holdings(self) -> dict[Worker, tuple[Holding, ...]]:
        """What the workers that wait have reported."""
        waiting = self.living(Status.READY, Status.FINISHED)
        return {worker: self.state.workers[worker].holdings for worker in waiting}


def describe_status(status: int) -> str:
    """ "ended with exit code 1", "was killed by signal 9"."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
