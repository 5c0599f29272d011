"""Journals for the tests: written by hand, event by event, decided by the real coordinator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilient import wire
from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.model import Config, ErrorInfo, Holding, Phase, State, Worker

NODE = "a"
ROOT = Path(__file__).resolve().parents[2]


def line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def code_without_a_reader(arguments: Sequence[str]) -> int:
    """The exit code of `resilient ...` whose output goes into a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "resilient.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(write_end)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode


class Job:
    """A job as the agent would live it; each call is one event at a time that the test names."""

    def __init__(self, path: Path, *, num_ranks: int = 4, **config: Any) -> None:
        self.path = path
        self.num_ranks = num_ranks
        self.state: State = coordinator.initial(Config(**config))
        header = {"version": 1, "config": {}, "start_unix_s": 1.0, "argv": ["resilient-run"]}
        path.write_bytes(line(header))
        self.feed(0.0, ev.NodeJoined(NODE, num_ranks))
        self.feed(0.1, ev.StoreOpened(self.state.num_restarts, "127.0.0.1", 1000))

    def feed(self, now_s: float, event: ev.Event) -> tuple[ev.Effect, ...]:
        decision = coordinator.step(self.state, event, now_s)
        self.state = decision.state
        record = {
            "now": now_s,
            "event": wire.event_to_json(event),
            "phase": self.state.phase.value,
            "effects": [wire.effect_to_json(effect) for effect in decision.effects],
            "reason": decision.reason,
        }
        with self.path.open("ab") as file:
            file.write(line(record))
        return decision.effects

    @property
    def generation(self) -> int:
        assert self.state.plan is not None
        return self.state.plan.generation

    def worker(self, rank: int) -> Worker:
        assert self.state.plan is not None
        return self.state.plan.members[rank].worker

    def ranks(self) -> range:
        assert self.state.plan is not None
        return range(self.state.plan.world_size)

    def ready_all(self, now_s: float) -> None:
        """Every living process that is not at the decorator yet gets there."""
        for worker in sorted(self.state.workers):
            if self.state.workers[worker].status.value == "starting":
                self.feed(now_s, ev.WorkerReady(worker))

    def enter(self, now_s: float, *, joined_s: float, restored_s: float) -> None:
        """A published generation gets to RUNNING, with a store for the next one and its spare."""
        assert self.state.phase is Phase.RESTORING, self.state.phase
        for rank in self.ranks():
            self.feed(joined_s, ev.WorkerJoined(self.worker(rank), self.generation))
        for rank in self.ranks():
            self.feed(restored_s, ev.WorkerRestored(self.worker(rank), self.generation))
        self.feed(restored_s, ev.StoreOpened(self.generation + 1, "127.0.0.1", 1001))
        self.ready_all(restored_s)

    def step_all(self, now_s: float, step: int) -> None:
        for rank in self.ranks():
            self.feed(now_s, ev.WorkerStepped(self.worker(rank), self.generation, step))

    def start(self) -> None:
        """Generation 0 trains: entered at 1.0, its first step committed at 2.0."""
        self.ready_all(1.0)
        self.enter(1.0, joined_s=1.1, restored_s=1.2)
        self.step_all(2.0, 1)

    def interrupt(self, now_s: float, rank: int, step: int) -> None:
        self.feed(
            now_s,
            ev.WorkerInterrupted(self.worker(rank), self.generation, step, (Holding(step),)),
        )

    def fail(
        self, now_s: float, rank: int, step: int, name: str, *, in_collective: bool = False
    ) -> None:
        error = ErrorInfo(name, "train.py:12 in main", f"Traceback\n  ...\n{name}: it went wrong")
        held = (Holding(step),)
        self.feed(
            now_s,
            ev.WorkerFailed(self.worker(rank), self.generation, step, error, in_collective, held),
        )

    def die(self, now_s: float, rank: int, step: int, status: int = -9, **more: Any) -> None:
        self.feed(now_s, ev.WorkerExited(self.worker(rank), status, step, **more))

    def finish(self, now_s: float, step: int) -> None:
        for rank in self.ranks():
            self.feed(
                now_s, ev.WorkerFinished(self.worker(rank), self.generation, step, (Holding(step),))
            )
        self.end(now_s + 0.1)

    def end(self, now_s: float, status: int = 0) -> None:
        """Every process is gone."""
        for worker, known in sorted(self.state.workers.items()):
            self.feed(now_s, ev.WorkerExited(worker, -9 if known.killed else status))
        assert self.state.finished
