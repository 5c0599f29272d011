"""The agent with decorated scripts, against a worker that only speaks the wire (fake_worker.py)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.harness import Launcher, Run, wait_until

FAKE = Path(__file__).with_name("fake_worker.py")


def lines(run: Run, key: str) -> list[dict[str, Any]]:
    found = [line[line.index("{") :] for line in run.stdout.splitlines() if line.endswith("}")]
    every = [json.loads(line) for line in found]
    return [line for line in every if key in line]


def wait_started(run: Run, generation: int, num_ranks: int) -> dict[int, dict[str, Any]]:
    """Waits until so many ranks have entered the generation; what each was told."""

    def started() -> dict[int, dict[str, Any]]:
        return {line["rank"]: line for line in lines(run, "start") if line["start"] == generation}

    wait_until(lambda: len(started()) == num_ranks, f"generation {generation}", run._seen)
    return started()


def wait_step(run: Run, step: int) -> None:
    wait_until(lambda: min(run.ask_status()["steps"].values(), default=0) >= step, f"step {step}")


def wait_spare(run: Run) -> None:
    """Waits until a spare is at the decorator."""
    wait_until(lambda: len(run.events("WorkerReady")) > run.ask_status()["world_size"], "a spare")


def test_a_replacement_is_shown_as_the_place_it_takes(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "-t", "1:3", FAKE)
    first = wait_started(run, 0, 2)
    wait_spare(run)
    for rank, prefix in ((1, "[default1]:"), (0, "")):
        os.kill(first[rank]["pid"], signal.SIGKILL)
        generation = 2 - rank
        wait_started(run, generation, 2)
        start = next(
            x for x in run.stdout.splitlines() if f'start": {generation}, "rank": {rank}' in x
        )
        assert start.startswith(f"{prefix}{{")
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr
    (link,) = (run.logs / "attempt_0/1").glob("worker_*")
    assert link.is_symlink() and '"start": 1' in (link / "stdout.log").read_text()


def test_recovery_by_a_spare(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 3, "--inject", "kill:rank=1,step=999999", FAKE)
    first = wait_started(run, 0, 3)
    wait_spare(run)
    wait_step(run, 10)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = wait_started(run, 1, 3)
    assert [second[rank]["pid"] == first[rank]["pid"] for rank in range(3)] == [True, False, True]
    assert second[1]["before"] == "state of rank 1"
    assert second[0]["before"] is second[2]["before"] is None
    environment = second[1]["environment"]
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "1", "3"]
    assert environment["MASTER_PORT"] != first[1]["environment"]["MASTER_PORT"]
    spare = next(line for line in lines(run, "up") if line["up"] == second[1]["pid"])
    assert spare["RANK"] is spare["LOCAL_RANK"] is spare["MASTER_PORT"] is None
    wait_until(lambda: run.ask_status()["phase"] == "running", "running")
    assert run.ask_status()["recoveries"] == 1
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr
    assert "rank 1 died (SIGKILL)" in run.stderr


def test_a_drill_that_has_struck_is_not_given_out_again(launch: Launcher) -> None:
    # The fake does not obey drills: rank 0 marks the first as struck by hand, then dies.
    text = FAKE.read_text().replace(
        "    stepped = False\n",
        "    stepped = False\n"
        "    if start.generation == 0 and start.rank == 0:\n"
        "        page.mark_fault(0); time.sleep(0.1); os.kill(os.getpid(), 9)\n",
    )
    launch.script(text)
    drills = ["kill:rank=0,step=1", "kill:rank=1,step=99999"]
    run = launch("--nproc-per-node", 2, "--inject", drills[0], "--inject", drills[1], "script.py")
    assert wait_started(run, 0, 2)[0]["drills"] == drills
    assert wait_started(run, 1, 2)[0]["drills"] == ["", drills[1]]
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr
    exited = [record["event"] for record in run.events("WorkerExited")]
    assert exited[0]["began_s"] is not None


def test_shrinks_without_replacement(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 3, "--replace", "no", FAKE)
    pid = wait_started(run, 0, 3)[0]["pid"]
    wait_step(run, 2)
    os.kill(pid, signal.SIGKILL)
    second = wait_started(run, 1, 2)
    assert second[0]["environment"]["WORLD_SIZE"] == "2"
    assert second[0]["environment"]["LOCAL_RANK"] == "2"  # the highest rank fills the hole
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr


def test_asked_to_stop_drains(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "--checkpoint-dir", "ck", FAKE)
    wait_started(run, 0, 2)
    wait_step(run, 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    told = [line["told"] for line in lines(run, "told")]
    assert told.count("Abort") == 2
    assert told.count("Persist") == 1
    assert told.count("Stop") == 2
    exited = {tuple(r["event"]["worker"]): r["event"]["status"] for r in run.events("WorkerExited")}
    assert list(exited.values()).count(75) == 2


def test_a_worker_that_was_sent_sigterm_asks_for_the_drain(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, FAKE)
    pid = wait_started(run, 0, 2)[1]["pid"]
    os.kill(pid, signal.SIGTERM)
    assert run.wait() == 75, run.stderr


@pytest.mark.parametrize(
    ("error", "status"), [("builtins.ValueError", 1), ("resilient.errors.ConfigError", 2)]
)
def test_an_error_that_stays(launch: Launcher, error: str, status: int) -> None:
    (launch.base / "raise-1").write_text(error)
    run = launch("--nproc-per-node", 2, FAKE)
    assert run.wait() == status, run.stderr
    assert "rank 1 raised" in run.stderr


def test_everybody_dies(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "--spares", 0, FAKE)
    pids = [line["pid"] for line in wait_started(run, 0, 2).values()]
    wait_step(run, 2)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that none of them can still commit
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 70, run.stderr
    assert "no copy of step" in run.stderr


def test_a_stopped_rank_is_named_and_replaced(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "--hang-timeout", 1, "--interrupt-timeout", 9, FAKE)
    pid = wait_started(run, 0, 2)[1]["pid"]
    wait_spare(run)
    wait_step(run, 2)
    os.kill(pid, signal.SIGSTOP)
    second = wait_started(run, 1, 2)
    assert second[1]["pid"] != pid
    (hung,) = run.events("WorkersHung")
    assert "rank 1 is stopped by a signal" in hung["event"]["note"]
    assert len(hung["event"]["stopped"]) == 1
    (exited,) = run.events("WorkerExited")
    assert exited["now"] - hung["now"] < 4  # killed at once, not after the time to come out
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr
    assert "rank 1 hung" in run.stderr


def test_stacks_of_a_rank_that_stands_still(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "--hang-timeout", 1, "--interrupt-timeout", 0.5, FAKE)
    wait_started(run, 0, 2)
    wait_step(run, 2)
    (launch.base / "hang-0").touch()
    wait_started(run, 1, 2)
    stacks = (run.logs / "attempt_0/0/stacks.txt").read_text()
    assert "fake_worker.py" in stacks and "in run" in stacks
    assert (run.logs / "attempt_0/1/stacks.txt").read_text()
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr


def test_hang_detection_can_be_off(launch: Launcher) -> None:
    run = launch("--nproc-per-node", 2, "--hang-timeout", "off", FAKE)
    wait_started(run, 0, 2)
    (launch.base / "finish").touch()
    assert run.wait() == 0, run.stderr
    assert run.events("WorkersHung") == []


# ---------------------------------------------------------------- the end, with real workers

RETURNS = """
import os, time, resilient
@resilient.train
def main(job):
    print('in', flush=True)
    while job.rank == 1 and not os.path.exists('go'):
        time.sleep(0.01)
main()
time.sleep(float(os.environ.get('AFTER_S', '0')))
print('after', flush=True)
"""


def test_a_finished_rank_that_does_not_return_is_noticed(launch: Launcher) -> None:
    launch.script(RETURNS)
    run = launch("--nproc-per-node", 2, "--first-step-timeout", 4, "script.py")
    run.wait_line("in", 2)
    wait_until(lambda: run.events("WorkerFinished"), "rank 0 finishes", run._seen)
    os.kill(run.pids()[0], signal.SIGSTOP)
    (launch.base / "go").touch()
    assert run.wait() == 128 + 9
    assert "rank 0 hung" in run.stderr and "stopped by a signal" in run.stderr, run.stderr


def test_what_comes_after_main_takes_as_long_as_it_likes(launch: Launcher) -> None:
    launch.script(RETURNS)
    (launch.base / "go").touch()
    options = ("--hang-timeout", 1, "--first-step-timeout", 3)
    run = launch("--nproc-per-node", 2, *options, "script.py", env={"AFTER_S": "5"})
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("after") == 2
    assert run.events("WorkersHung") == []
