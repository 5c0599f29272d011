"""Runs the real command on real processes, with faults, and compares with a run that never broke."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

SCRIPT = Path(__file__).with_name("train_script.py")
ROOT = Path(__file__).parents[2]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    run_dir: Path | None
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
        out: Path,
        *options: str,
        script: Path | str = SCRIPT,
        arguments: tuple[str, ...] = (),
        num_ranks: int = 4,
        env: dict[str, str] | None = None,
    ) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.log_dir = out / "logs"
        command = [
            sys.executable, "-m", "resilient_run.cli",
            "--standalone", f"--nproc-per-node={num_ranks}", f"--log-dir={self.log_dir}", *options,
            str(script), *(("--out", str(out)) if script == SCRIPT else ()), *arguments,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "launcher"), environment.get("PYTHONPATH", "")]
        )
        environment.update(env or {})
        self.started_s = time.monotonic()
        with open(out / "stdout.txt", "wb") as stdout, open(out / "stderr.txt", "wb") as stderr:
            self.process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.seen: dict[int, psutil.Process] = {}

    def descendants(self) -> list[psutil.Process]:
        """Every process below the agent that was ever seen and still lives."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass
        return [process for process in self.seen.values() if _lives(process)]

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.descendants()
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}\n{self.finished().text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what}\n{self.output()}")
            time.sleep(0.01)

    def output(self) -> str:
        return (self.out / "stdout.txt").read_text() + (self.out / "stderr.txt").read_text()

    def journal_path(self) -> Path | None:
        found = sorted(self.log_dir.glob("**/journal.jsonl"))
        return found[-1] if found else None

    def journal(self) -> list[dict]:
        path = self.journal_path()
        if path is None:
            return []
        lines = path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def wait(self, timeout_s: float = 90) -> Run:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.descendants()
            if time.monotonic() > deadline:
                output = self.output()
                self.kill()
                raise AssertionError(f"still running after {timeout_s} s\n{output}")
            time.sleep(0.02)
        return self.finished()

    def finished(self) -> Run:
        path = self.journal_path()
        return Run(
            self.process.returncode,
            (self.out / "stdout.txt").read_text(),
            (self.out / "stderr.txt").read_text(),
            self.out,
            path.parent if path else None,
            self.journal(),
            time.monotonic() - self.started_s,
        )

    def kill(self) -> None:
        """Ends the agent and everything below it, whatever state it is in."""
        below = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass

    def assert_nothing_left(self, timeout_s: float = 5) -> None:
        deadline = time.monotonic() + timeout_s
        while self.descendants():
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {self.descendants()}")
            time.sleep(0.02)


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
