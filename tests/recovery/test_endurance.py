"""Many random faults in one run: no step lost or repeated, and nothing grows.

The seed is printed with every failure; `RESILIENT_SEED=N` repeats the choices (the moments depend
on the machine).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from resilient_run.heritage import NUM_KEPT
from tests.launcher.harness import is_alive, wait_until
from tests.recovery.harness import (
    Launch,
    assert_same_samples,
    assert_same_state,
    samples_by_step,
)


class Usage:
    """What one process holds, in descriptors, threads and bytes of its own."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self.num_fds = process.num_fds()
        self.num_threads = process.num_threads()
        self.unique_bytes = process.memory_full_info().uss

    def __repr__(self) -> str:
        return f"{self.num_fds} fds, {self.num_threads} threads, {self.unique_bytes >> 20} MiB"


def steps_committed(job: Launch) -> int:
    return max(job.process.ask_status()["steps"].values(), default=0)


def is_at_rest(job: Launch) -> bool:
    """Every rank trains, and both spares are ready and were launched."""
    seen = job.process.ask_status()
    return seen["phase"] == "running" and len(seen["pids"]) == 4 and seen["spares"] == 2


def kill_one(job: Launch, choose: Callable[[list[int]], int]) -> None:
    """SIGKILL to a rank that lives; the agent may not have noticed the last death yet."""

    def killed() -> bool:
        pids = job.process.pids()
        pid = pids.get(choose(sorted(pids)), 0) if pids else 0
        if pid <= 1 or not is_alive(pid):  # 1: not forked yet
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        wait_until(lambda: not is_alive(pid), "it is gone", job.output)
        return True

    wait_until(killed, "a rank that lives", job.output)


def wait_step(job: Launch) -> None:
    before = steps_committed(job)
    wait_until(lambda: steps_committed(job) > before, "a step", job.output)


def usage_at_rest(job: Launch) -> Usage:
    """Of the agent. Processes that end and begin hold a few descriptors each."""
    wait_until(lambda: is_at_rest(job), "the ranks train, the spares wait", job.output)
    return Usage(job.process.pid)


def kill_each_rank(job: Launch) -> None:
    """So often that the agent keeps as many pages of dead processes as it ever will."""
    for _ in range(NUM_KEPT):
        for rank in range(4):
            wait_step(job)
            kill_one(job, lambda ranks, rank=rank: rank)
    wait_step(job)


def kill_at_random(job: Launch, draw: random.Random, num_kills: int) -> None:
    """Kills random ranks at random moments, some of them inside the recovery from the last kill."""
    for number in range(1, num_kills + 1):
        # A tenth of them at once, in the middle of the recovery; but never three in a row, which
        # would end the job as one that does not get anywhere.
        if number % 10:
            wait_step(job)
        time.sleep(draw.uniform(0, 0.03))
        kill_one(job, draw.choice)


@pytest.mark.parametrize(
    "num_kills", [10, pytest.param(100, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])]
)
def test_random_kills(launch, unbroken, num_kills):
    seed = int(os.environ.get("RESILIENT_SEED", random.randrange(1 << 30)))
    num_steps = 600 + 16 * num_kills
    arguments = ("--steps", str(num_steps))
    job = launch("--spares=2", arguments=arguments)
    job.wait_until(lambda: (job.out / "logs").exists() and job.journal(), "a journal")
    job.wait_until(lambda: steps_committed(job) >= 3, "three steps")
    kill_each_rank(job)
    first = usage_at_rest(job)
    kill_at_random(job, random.Random(seed), num_kills)
    last = usage_at_rest(job)
    run = job.wait(240)
    assert run.code == 0, f"seed {seed}\n{run.text()}"
    expected = unbroken(*arguments)
    assert_same_state(run, expected)
    assert_same_samples(run, expected)
    assert sorted(samples_by_step(run.out)) == list(range(num_steps))
    assert len([e for e in run.events("WorkerExited") if e["status"] == -9]) >= num_kills
    assert last.num_fds <= first.num_fds + 4, f"seed {seed}: {first}, then {last}"
    assert last.num_threads <= first.num_threads + 2, f"seed {seed}: {first}, then {last}"
    assert last.unique_bytes <= first.unique_bytes + (32 << 20), (
        f"seed {seed}: {first}, then {last}"
    )


def test_a_survivor_of_many_generations_does_not_grow(launch, unbroken):
    """Rank 0 is entered again and again in one process; its peers are killed in turn."""
    arguments = ("--steps", "400")
    drills = [f"--inject=kill:rank={1 + n % 3},step={10 + 15 * n}" for n in range(20)]
    job = launch(*drills, arguments=arguments)
    job.wait_until(lambda: (job.out / "logs").exists() and job.journal(), "a journal")

    def generation() -> int:
        return job.process.ask_status()["generation"]

    job.wait_until(lambda: generation() >= 4, "four recoveries")
    pid = job.process.pids()[0]
    early = Usage(pid)
    job.wait_until(lambda: generation() >= 19, "nineteen recoveries")
    assert job.process.pids()[0] == pid
    late = Usage(pid)
    run = job.wait()
    assert run.code == 0, run.text()
    assert late.num_fds <= early.num_fds + 6, (early, late)
    assert late.num_threads <= early.num_threads + 4, (early, late)
    assert late.unique_bytes <= early.unique_bytes + (24 << 20), (early, late)
    expected = unbroken(*arguments)
    assert_same_state(run, expected)
    assert_same_samples(run, expected)
