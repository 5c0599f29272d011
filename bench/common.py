"""What the benchmarks share: launching a run, and reading what its ranks have logged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORKLOAD = HERE / "workload.py"
RUN_TIMEOUT_S = 180


def environment(**more: str) -> dict[str, str]:
    """For children: one thread a rank, and this tree first on the import path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def command_of(launcher: str) -> list[str]:
    """resilient-run or torchrun, by module: the same interpreter as this one."""
    module = {"resilient-run": "resilient_run.cli", "torchrun": "torch.distributed.run"}[launcher]
    return [sys.executable, "-m", module, "--standalone"]


def run(command: Sequence[str], out: Path, **more_environment: str) -> None:
    """Runs to the end. What it prints goes to a file, shown if it fails.

    Raises:
        SystemExit: it failed, or took longer than RUN_TIMEOUT_S.
    """
    out.mkdir(parents=True)
    log = out / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(**more_environment),
        )
        try:
            code: int | None = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = None
    if code != 0:
        how = f"took more than {RUN_TIMEOUT_S} s" if code is None else f"ended with {code}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        sys.exit(f"{tail}\n{' '.join(command)}\n{how}")


class Step(NamedTuple):
    """A step that one rank has committed; processor_ns: what its process had used by then."""

    ns: int
    num_steps: int
    generation: int
    processor_ns: int


def logged_steps(out: Path) -> list[Step]:
    """Of all ranks, in the order of time."""
    return sorted(
        Step(*map(int, line.split()))
        for path in out.glob("steps-*.txt")
        for line in path.read_text().splitlines()
    )


def remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
