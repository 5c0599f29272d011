"""Runs `resilient-run` for real, waits for conditions, and finds what a run left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


def wait_until(
    condition: Callable[[], Any], what: str, seen: Callable[[], object] = lambda: ""
) -> Any:
    """Waits for a condition, with a bound; says what was seen when it does not come."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            pytest.fail(f"not in {WAIT_S:g} s: {what}; seen: {seen()}")
        time.sleep(0.01)


def processes_with(mark: str) -> dict[int, str]:
    """Living processes that have this text in their environment: pid -> the head of their stat."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        if mark.encode() in environment and stat.rpartition(")")[2].split()[0] != "Z":
            found[int(entry)] = stat[:60]
    return found


def descendants_of(pid: int) -> dict[int, str]:
    """Living descendants: pid -> name. (A forked process keeps the environ it was forked with.)"""
    found = {}
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return {}
    for child in map(int, text.split()):
        try:
            stat = Path(f"/proc/{child}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found[child] = stat.partition("(")[2].rpartition(")")[0]
        found.update(descendants_of(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@dataclass
class Run:
    """One run of resilient-run."""

    pid: int
    directory: Path
    status: int | None = None
    pump: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def stdout(self) -> str:
        return (self.directory / "out.txt").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "err.txt").read_text()

    @property
    def logs(self) -> Path:
        """The run directory."""
        found = [path for path in (self.directory / "logs").iterdir() if path.is_dir()]
        assert len(found) == 1, found
        return found[0]

    @property
    def journal(self) -> list[dict[str, Any]]:
        lines = (self.logs / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Records of the journal with this type of event."""
        return [record for record in self.journal[1:] if record["event"]["type"] == name]

    def effects(self, name: str) -> list[dict[str, Any]]:
        every = [effect for record in self.journal[1:] for effect in record["effects"]]
        return [effect for effect in every if effect["type"] == name]

    def pids(self) -> dict[int, int]:
        """rank -> pid, by asking as `resilient status` does."""
        return {int(rank): pid for rank, pid in self.ask_status()["pids"].items()}

    def ask_status(self) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            directory_fd = os.open(self.logs, os.O_PATH)
            client.connect(f"/proc/self/fd/{directory_fd}/status.sock")
            os.close(directory_fd)
            answer: dict[str, Any] = json.loads(client.makefile().read())
            return answer

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """The exit status; minus the signal number."""
        wait_until(self._ended, "the run ends", self._seen)
        assert self.status is not None
        return self.status

    def wait_line(self, text: str, count: int = 1) -> None:
        """Waits until stdout has the text so many times."""
        wait_until(lambda: self.stdout.count(text) >= count, f"{count} x {text!r}", self._seen)

    def _seen(self) -> str:
        return self.stdout[-2000:] + self.stderr[-4000:]

    def _ended(self) -> bool:
        self.pump()
        return self.status is not None


class Launcher:
    """Starts runs, each in a directory of its own, and knows all their processes."""

    def __init__(self, channel: socket.socket, base: Path) -> None:
        self._channel = channel
        self.base = base
        self.runs: list[Run] = []
        self._seen: dict[int, str] = {}

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.base / name
        path.write_text(text)
        return path

    def __call__(self, *argv: object, env: dict[str, str] | None = None) -> Run:
        """Starts resilient-run, with its logs below the run's directory."""
        directory = self.base / f"run{len(self.runs)}"
        directory.mkdir()
        arguments = ["--log-dir", str(directory / "logs"), *map(str, argv)]
        environment = {"OMP_NUM_THREADS": "1", **(env or {})}
        request = {"argv": arguments, "cwd": str(self.base), "env": environment}
        run = Run(pid=0, directory=directory, pump=self._pump)
        self.runs.append(run)
        files = [open(directory / name, "w") for name in ("out.txt", "err.txt")]
        socket.send_fds(self._channel, [json.dumps(request).encode()], [f.fileno() for f in files])
        for file in files:
            file.close()
        wait_until(lambda: (self._pump(), run.pid)[1], "the server answers")
        return run

    def _pump(self) -> None:
        for run in self.runs:
            if run.status is None and run.pid:
                self._seen.update(descendants_of(run.pid))
        while True:
            try:
                answer = json.loads(self._channel.recv(10_000))
            except BlockingIOError:
                return
            for run in self.runs:
                if "status" in answer and run.pid == answer["pid"]:
                    run.status = answer["status"]
                elif "status" not in answer and not run.pid:
                    run.pid = answer["pid"]

    def left(self) -> dict[int, str]:
        """Descendants that a run was seen with, and that live although it has ended."""
        return {pid: name for pid, name in self._seen.items() if is_alive(pid)}

    @property
    def pids(self) -> list[int]:
        """Of every process that was ever seen below a run."""
        return sorted(self._seen)

    def note_processes(self) -> None:
        """Remembers who is there now."""
        self._pump()

    def clean_up(self) -> dict[int, str]:
        """Kills the runs and what is left of them; returns what should not have been there."""
        self._pump()
        for run in self.runs:
            if run.pid and run.status is None:
                os.kill(run.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while (left := self.left()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for pid in left:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        wait_until(self._all_ended, "every run has ended")
        return left

    def _all_ended(self) -> bool:
        self._pump()
        return all(run.status is not None for run in self.runs)


def start_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"},
        cwd="/",
    )
    theirs.close()
    ours.setblocking(False)
    return server, ours
