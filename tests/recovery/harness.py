"""Runs the real command under real faults, and compares with a run that never broke."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.launcher.harness import Launcher, wait_until

SCRIPT = Path(__file__).with_name("train_script.py")


@dataclass
class Run:
    """A finished run.

    Attributes:
        journal: its events as JSON values, in order.
        wall_s: how long the command took.
    """

    code: int
    stdout: str
    stderr: str
    out: Path
    journal: list[dict]
    wall_s: float

    def events(self, kind: str) -> list[dict]:
        return [line["event"] for line in self.journal if line.get("event", {}).get("type") == kind]

    def effects(self, kind: str) -> list[dict]:
        return [e for line in self.journal for e in line.get("effects", ()) if e["type"] == kind]

    @property
    def generations(self) -> int:
        return len(self.effects("PublishPlan"))

    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Launch:
    """One `resilient-run` in the making: started at once, finished by `wait()`."""

    def __init__(
        self,
        launcher: Launcher,
        *options: str,
        script: Path | str = SCRIPT,
        arguments: tuple[str, ...] = (),
        num_ranks: int = 4,
    ) -> None:
        self._launcher = launcher
        self.out = launcher.base / f"run{len(launcher.runs)}"
        self._started_s = time.monotonic()
        self.process = launcher(
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            *options,
            script,
            *(("--out", self.out) if script == SCRIPT else ()),
            *arguments,
        )

    def ended(self) -> bool:
        self.process.pump()
        return self.process.status is not None

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for it while the job runs."""
        wait_until(lambda: condition() or self.ended(), what, self.output)
        assert condition() or not self.ended(), f"ended before {what}\n{self.output()}"

    def output(self) -> str:
        return self.process.stdout + self.process.stderr

    def journal(self) -> list[dict]:
        paths = list(self.out.glob("logs/*/journal.jsonl"))
        lines = paths[0].read_bytes().split(b"\n") if paths else [b""]
        return [json.loads(line) for line in lines[:-1]]

    def wait(self, timeout_s: float = 90) -> Run:
        deadline_s = time.monotonic() + timeout_s
        while not self.ended():
            assert time.monotonic() < deadline_s, f"runs after {timeout_s} s\n{self.output()}"
            time.sleep(0.02)
        return Run(
            self.process.status,
            self.process.stdout,
            self.process.stderr,
            self.out,
            self.journal(),
            time.monotonic() - self._started_s,
        )

    def signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def assert_nothing_left(self) -> None:
        """No process that was ever seen below this job's agent, or any other's of this test."""
        wait_until(lambda: not self._launcher.left(), "nothing is left", self._launcher.left)


def final_state(out: Path, rank: int = 0) -> dict:
    return torch.load(out / f"final-{rank}.pt", weights_only=True)


def flatten(state: object, name: str = "") -> dict[str, object]:
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, (list, tuple)):
        items = list(enumerate(state))
    else:
        return {name: state}
    return {k: v for key, value in items for k, v in flatten(value, f"{name}.{key}").items()}


def assert_same_state(run: Run, unbroken: Run, *, tolerance: float | None = None) -> None:
    """Final parameters, buffers and optimizer state: bitwise equal, or within the tolerance."""
    for rank in sorted(int(p.stem.split("-")[1]) for p in run.out.glob("final-*.pt")):
        got, expected = flatten(final_state(run.out, rank)), flatten(final_state(unbroken.out))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            if name == ".rank":
                continue
            if not isinstance(value, torch.Tensor):
                assert got[name] == value, (rank, name, got[name], value)
            elif tolerance is None:
                assert torch.equal(got[name], value), f"rank {rank}: {name} differs"
            else:
                torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


def samples_by_step(out: Path) -> dict[int, list[int]]:
    """What each step was computed from: the indexes of its newest generation, sorted."""
    seen: dict[int, dict[int, list[int]]] = {}
    for path in out.glob("samples-*.txt"):
        for line in path.read_text().split("\n")[:-1]:
            step, generation, _, *indexes = map(int, line.split())
            seen.setdefault(step, {}).setdefault(generation, []).extend(indexes)
    return {step: sorted(by[max(by)]) for step, by in seen.items()}


def assert_same_samples(run: Run, unbroken: Run) -> None:
    assert samples_by_step(run.out) == samples_by_step(unbroken.out)
