"""Runs a function on several real ranks, each a process forked from one that has torch imported.

As a module, `Ranks`; as a script, the process that forks them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent


class Ranks:
    """One process with torch imported, that forks the ranks of one check after the other."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_HERE)]),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, target: str, world_size: int, directory: Path, timeout_s: float = 60) -> None:
        """Calls module:function(rank, world_size, directory) on each rank, joined by gloo.

        Raises AssertionError with what the ranks said when one fails, or all take too long.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = [target, world_size, str(directory), timeout_s]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        problem = json.loads(self._process.stdout.readline())
        assert not problem, f"{target} on {world_size} ranks: {problem}"

    def close(self) -> None:
        self._process.communicate(timeout=30)


def _rank(target: str, rank: int, world_size: int, directory: Path) -> None:
    import torch.distributed as dist

    module, _, name = target.partition(":")
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    getattr(importlib.import_module(module), name)(rank, world_size, directory)
    dist.barrier()
    dist.destroy_process_group()


def _fork(target: str, rank: int, world_size: int, directory: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(directory / f"rank-{rank}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _rank(target, rank, world_size, directory)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve(target: str, world_size: int, directory: Path, timeout_s: float) -> str:
    """Runs one check; returns what went wrong, "" if nothing."""
    deadline_s = time.monotonic() + timeout_s
    children = {_fork(target, rank, world_size, directory): rank for rank in range(world_size)}
    problem = ""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            if status:
                text = (directory / f"rank-{rank}.log").read_text()
                problem += f"rank {rank} ended with wait status {status}\n{text}\n"
        elif problem or time.monotonic() > deadline_s:
            problem += f"ranks {sorted(children.values())} had not ended"
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            children = {}
        else:
            time.sleep(0.005)
    return problem


def _main() -> None:
    import torch._dynamo  # or the first optimizer of each rank imports it
    import torch.distributed  # noqa: F401

    for line in sys.stdin:
        target, world_size, directory, timeout_s = json.loads(line)
        importlib.import_module(target.partition(":")[0])
        print(json.dumps(_serve(target, world_size, Path(directory), timeout_s)), flush=True)


if __name__ == "__main__":
    _main()
