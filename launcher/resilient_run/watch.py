"""Workers that send nothing: readings of their pages, why they stand still, and their stacks.

The one idea: all of it works on a worker that cannot cooperate. The page is read, not asked for;
the kernel says whether a process is stopped; and stacks are written by a signal handler in C,
whoever holds the GIL.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from resilient.core.detector import Activity, Pulse
from resilient.core.events import WorkersHung
from resilient.core.model import Plan, Worker
from resilient_run import evidence
from resilient_run.bootstrap import STACKS_SIGNAL
from resilient_run.workers import WorkerProcess

DUMP_TIMEOUT_S = 1.0


def pulse(process: WorkerProcess) -> Pulse:
    """The worker's page, as the detector takes it."""
    reading = process.page.read()
    return Pulse(
        process.worker,
        reading.generation,
        reading.step,
        Activity(reading.activity),
        reading.progress_ns / 1e9,
        commit_s=reading.commit_ns / 1e9,
        section=reading.section,
        section_timeout_s=reading.section_timeout_ns / 1e9,
        ticks=reading.ticks,
    )


def with_process_states(
    hung: WorkersHung, workers: Mapping[Worker, WorkerProcess], plan: Plan | None
) -> WorkersHung:
    """The same with what the kernel knows of why they stand still; those come first."""
    states = []
    stopped = []
    for worker in hung.workers:
        state = evidence.describe_state(workers[worker].pid) if worker in workers else ""
        if state:
            rank = plan.rank_of(worker) if plan is not None else None
            states.append((worker, f"rank {rank} is {state}"))
            if evidence.is_stopped(workers[worker].pid):
                stopped.append(worker)
    notes = [text for _, text in states] + [hung.note]
    # The first one named is the one accused: rather one that cannot move than its waiters.
    accused = [worker for worker, _ in states]
    others = [worker for worker in hung.workers if worker not in accused]
    return replace(hung, workers=(*accused, *others), note="; ".join(notes), stopped=tuple(stopped))


def ask_for_stacks(workers: Iterable[WorkerProcess]) -> dict[str, int]:
    """Has the workers write their stacks. Returns the files, and their sizes before."""
    asked: dict[str, int] = {}
    for process in workers:
        # One that is stopped answers no signal, and a command would die of it.
        if process.observed and not evidence.describe_state(process.pid):
            asked[process.logs.stacks] = size(process.logs.stacks)
            process.kill(STACKS_SIGNAL)
    return asked


async def wait_stacks_written(asked: dict[str, int]) -> None:
    """Waits until the files have grown and grow no more, or the bound is over."""
    deadline_s = time.monotonic() + DUMP_TIMEOUT_S
    while asked and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
        now = {path: size(path) for path in asked}
        await asyncio.sleep(0.01)
        asked = {path: was for path, was in asked.items() if not was < now[path] == size(path)}


def size(path: str) -> int:
    """In bytes; 0 for a file that is not there."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
