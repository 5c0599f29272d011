"""Runs a function on several forked ranks with a gloo group, and brings their results back."""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in every rank
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1

torch.set_num_threads(1)  # no pool of threads in the process that the ranks are forked from


def run_ranks(
    directory: Path, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Returns fn(rank, *args) of every rank, made with the default group of that world joined.

    A rank that is killed gives its exit status instead (negative: a signal). Raises AssertionError
    with the traceback of a rank that raised, or naming the ranks that did not end in time.
    """
    store = directory / f"store-{time.monotonic_ns()}"
    pipes, pids = {}, []
    for rank in range(world_size):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The ranks go when the test does, however it ends.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.close(read_fd)
            _be_rank(rank, world_size, store, write_fd, fn, args)
        os.close(write_fd)
        pids.append(pid)
        pipes[read_fd] = rank
    try:
        outputs, late = _collect(pids, pipes, timeout_s)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    finally:
        store.unlink(missing_ok=True)
    results = []
    for rank, status in enumerate(statuses):
        if not outputs[rank]:
            results.append(status)
            continue
        ok, value = pickle.loads(outputs[rank])
        assert ok, f"rank {rank} raised:\n{value}"
        results.append(value)
    assert not late, f"ranks {late} did not end within {timeout_s} s"
    return results


def _collect(
    pids: list[int], pipes: dict[int, int], timeout_s: float
) -> tuple[list[bytes], list[int]]:
    """What each rank wrote, and the ranks that had to be killed for being late."""
    outputs = [b""] * len(pids)
    late: list[int] = []
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for read_fd in pipes:
            selector.register(read_fd, selectors.EVENT_READ)
        while pipes:
            events = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not events:
                late = sorted(pipes.values())
                for rank in late:
                    os.kill(pids[rank], signal.SIGKILL)
                deadline_s = time.monotonic() + 5
            for key, _ in events:
                data = os.read(key.fd, 1 << 20)
                outputs[pipes[key.fd]] += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    del pipes[key.fd]
    return outputs, late


def _be_rank(
    rank: int, world_size: int, store: Path, write_fd: int, fn: Callable[..., Any], args: Any
) -> None:
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        answer: tuple[bool, Any] = (True, fn(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        data = pickle.dumps(answer)
        while data:
            data = data[os.write(write_fd, data) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
