"""Runs a function on several real ranks, each a process forked from one that has torch imported.

As a module, `run`; as a script, the process that forks them.
"""

from __future__ import annotations

import importlib
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


def run(target: str, world_size: int, directory: Path, timeout_s: float = 60) -> None:
    """Calls module:function(rank, world_size, directory) on each rank, joined by gloo.

    Raises AssertionError with what the ranks wrote when one of them fails, or all take too long.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_HERE}",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, target, str(world_size), str(directory), str(timeout_s)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s + 30
    )
    assert done.returncode == 0, f"{target} on {world_size} ranks:\n{done.stdout}\n{done.stderr}"


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


def _main() -> int:
    target, world_size, directory, timeout_s = sys.argv[1:]

    importlib.import_module(target.partition(":")[0])
    deadline_s = time.monotonic() + float(timeout_s)
    children = {}
    for rank in range(int(world_size)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _rank(target, rank, int(world_size), Path(directory))
                status = 0
            except BaseException:
                sys.stderr.write(f"rank {rank}: {traceback.format_exc()}")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children[pid] = rank
    failed = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            if status:
                failed = 1
                print(f"rank {rank} ended with wait status {status}", flush=True)
        elif failed or time.monotonic() > deadline_s:
            print(f"ranks {sorted(children.values())} are killed", flush=True)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return 1
        else:
            time.sleep(0.01)
    return failed


if __name__ == "__main__":
    sys.exit(_main())
