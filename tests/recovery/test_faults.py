"""Every kind of fault on one machine, with real processes, compared with an unbroken run.

At an unchanged world size "equal" is bitwise: parameters, BatchNorm's buffers, AdamW's moments, on
every rank, with dropout on each rank's own random numbers.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.launcher.harness import descendants_of
from tests.recovery.harness import assert_same_samples, assert_same_state

HANG = "--hang-timeout=2"
ENTER = "--first-step-timeout=10"


def recovered(launch, unbroken, *options, arguments=(), num_ranks=4, generations=2, tolerance=None):
    """Runs with the options and asserts that the job ended as if nothing had happened."""
    expected = unbroken(*arguments, num_ranks=num_ranks)
    job = launch(*options, arguments=arguments, num_ranks=num_ranks)
    run = job.wait()
    assert run.code == 0, run.text()
    expected_generations = generations if isinstance(generations, tuple) else (generations,)
    assert run.generations in expected_generations, run.text()
    assert_same_state(run, expected, tolerance=tolerance)
    assert_same_samples(run, expected)
    job.assert_nothing_left()
    return run


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "fault",
    [
        "kill",
        "segv",
        "exit:code=1",
        "exit:code=0",
        "raise",
        "stop",
        "hang-in-python",
        "hang-holding-the-GIL",
    ],
)
def test_one_rank_fails_once(launch, unbroken, fault, rank):
    kind, _, extra = fault.partition(":")
    drill = f"{kind}:rank={rank},step=20" + (f",{extra}" if extra else "")
    run = recovered(launch, unbroken, HANG, f"--inject={drill}")
    if kind == "raise":  # the same process enters again
        assert len(run.effects("StartWorker")) == 5
    survivors = run.effects("AbortGeneration")[0]["workers"]
    comes_out = kind in ("hang-in-python", "hang-holding-the-GIL")  # or is given the time to
    assert len(survivors) == (4 if comes_out else 3)


@pytest.mark.parametrize("step", [0, 39])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_fault_in_the_first_step_and_in_the_last(launch, unbroken, kind, step):
    recovered(launch, unbroken, f"--inject={kind}:rank=1,step={step}")


@pytest.mark.parametrize("at", ["optimizer", "after-step"])
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_inside_and_after_the_optimizer_step(launch, unbroken, rank, at):
    recovered(launch, unbroken, f"--inject=kill:rank={rank},step=20,at={at}")


@pytest.mark.parametrize("step", [0, 1, 20])
def test_killed_in_a_logged_loss_after_the_optimizer_step(launch, unbroken, step):
    """Every survivor is past the step and before the commit: only the undo copy has the step."""
    recovered(
        launch,
        unbroken,
        f"--inject=kill:rank=2,step={step},at=after-step",
        arguments=("--logged-loss",),
    )


def test_sections_commit_before_their_collectives(launch, unbroken):
    arguments = ("--section-every", "5")
    recovered(launch, unbroken, "--inject=kill:rank=2,step=21", arguments=arguments)


@pytest.mark.parametrize("ranks", [(1, 2), (0, 1, 3)], ids=["as spares", "more than spares"])
def test_several_ranks_at_once(launch, unbroken, ranks):
    arguments = ("--pause-s", "0.02")
    job = launch("--spares=2", arguments=arguments)
    job.wait_until(lambda: len(_steps(job)) >= 5, "five steps")
    kill_at_once(job, *ranks)
    run = job.wait()
    assert run.code == 0, run.text()
    assert run.generations == 2, run.text()
    assert_same_state(run, unbroken(*arguments))
    assert_same_samples(run, unbroken(*arguments))


def test_no_spare(launch, unbroken):
    recovered(launch, unbroken, "--spares=0", "--inject=kill:rank=1,step=20")


def test_started_by_spawn(launch, unbroken):
    recovered(launch, unbroken, "--start-method=spawn", "--inject=kill:rank=1,step=20")


@pytest.mark.parametrize("at", ["stopping", "waiting"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_survivor_dies_while_the_generation_ends(launch, unbroken, rank, at):
    """The second fault during recovery: before the survivor's report, or after it."""
    run = recovered(
        launch,
        unbroken,
        "--spares=2",
        "--inject=kill:rank=1,step=20",
        f"--inject=kill:rank={rank},generation=0,at={at}",
        # It may be gone before the plan that counts on it, or just after.
        generations=(2, 3) if at == "waiting" else 2,
    )
    killed = [event["worker"][1] for event in run.events("WorkerExited") if event["status"] == -9]
    assert {1, rank} <= set(killed)


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
@pytest.mark.parametrize("at", ["joining", "building", "restoring"])
@pytest.mark.parametrize("rank", [1, 3], ids=["replacement", "survivor"])
def test_second_fault_while_the_next_generation_begins(launch, unbroken, rank, at, kind):
    if kind == "raise" and at == "joining":
        pytest.skip("no user code runs while groups are made")
    recovered(
        launch,
        unbroken,
        "--spares=2",
        HANG,
        ENTER,
        "--inject=kill:rank=1,step=20",
        f"--inject={kind}:rank={rank},generation=1,at={at}",
        generations=3,
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_the_same_error_for_ever_stops_the_job(launch, rank):
    job = launch(f"--inject=raise:rank={rank},step=20,times=inf")
    run = job.wait()
    assert run.code == 1, run.text()
    assert run.generations == 2
    assert f"rank {rank}" in run.stderr and "step 20" in run.stderr, run.text()
    assert "Traceback" in run.stderr, run.text()
    job.assert_nothing_left()


def kill_at_once(job, *ranks: int) -> None:
    """At one moment: all are stopped before the first one is killed."""
    pids = job.process.pids()
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            os.kill(pids[rank], signum)


def test_all_ranks_at_once_without_a_copy_stops_with_a_clear_word(launch):
    job = launch(arguments=("--pause-s", "0.05"))
    job.wait_until(lambda: len(_steps(job)) >= 5, "five steps")
    kill_at_once(job, 0, 1, 2, 3)
    run = job.wait()
    assert run.code == 70, run.text()
    assert "--checkpoint-dir" in run.stderr, run.text()


def test_all_ranks_at_once_go_on_from_the_checkpoint(launch, unbroken, tmp_path):
    """Paced, so that a checkpoint is complete before the faults."""
    arguments = ("--pause-s", "0.05")
    directory = tmp_path / "checkpoints"
    job = launch(f"--checkpoint-dir={directory}", "--checkpoint-every=5", arguments=arguments)
    job.wait_until(lambda: list(directory.glob("step-*")), "a checkpoint")
    kill_at_once(job, 0, 1, 2, 3)
    run = job.wait()
    assert run.code == 0, run.text()
    assert run.generations == 2, run.text()
    assert_same_state(run, unbroken(*arguments))
    assert_same_samples(run, unbroken(*arguments))
    assert run.effects("PublishPlan")[1]["plan"]["cut"]["kind"] == "disk"


def test_a_slot_that_dies_three_times_is_excluded(launch, unbroken):
    """The world shrinks to three; the global batch and the sample order hold."""
    arguments = ("--no-dropout", "--no-batch-norm")
    run = recovered(
        launch,
        unbroken,
        "--inject=kill:rank=1,step=20,times=3",
        arguments=arguments,
        generations=4,
        tolerance=1e-4,
    )
    assert [e["slot"][1] for e in run.effects("ExcludeSlot")] == [1]
    assert len(run.effects("PublishPlan")[-1]["plan"]["members"]) == 3


def test_replace_no_shrinks_at_once(launch, unbroken):
    arguments = ("--no-dropout", "--no-batch-norm")
    run = recovered(
        launch,
        unbroken,
        "--replace=no",
        "--inject=kill:rank=0,step=20",
        "--inject=kill:rank=1,step=30",
        arguments=arguments,
        generations=3,
        tolerance=1e-4,
    )
    plan = run.effects("PublishPlan")[-1]["plan"]
    assert [m["rank"] for m in plan["members"]] == [0, 1]


def test_below_the_minimum_the_job_stops(launch):
    run = launch("--replace=no", "--min-world-size=4", "--inject=kill:rank=3,step=20").wait()
    assert run.code == 70, run.text()
    assert "minimum" in run.stderr


@pytest.mark.parametrize("kind", ["raise", "stop", "hang-in-python"])
def test_world_of_one_with_its_memory_alive(launch, unbroken, kind, tmp_path):
    """A lone rank that raises goes on in memory; one that hangs has only the disk."""
    options = [HANG, f"--inject={kind}:rank=0,step=20"]
    if kind != "raise":
        options += [f"--checkpoint-dir={tmp_path / 'c'}", "--checkpoint-every=5"]
    recovered(launch, unbroken, *options, num_ranks=1, arguments=("--pause-s", "0.02"))


def test_world_of_one_killed_goes_on_from_the_checkpoint(launch, unbroken, tmp_path):
    recovered(
        launch,
        unbroken,
        f"--checkpoint-dir={tmp_path / 'c'}",
        "--checkpoint-every=5",
        "--inject=kill:rank=0,step=30",
        num_ranks=1,
        arguments=("--pause-s", "0.02"),
    )


def test_a_finished_worker_waits_while_another_fails(launch, unbroken):
    """Rank 3 dies after its last step, when rank 0's function has already returned."""
    arguments = ("--late-kill-rank", "3")
    expected = unbroken()
    job = launch(arguments=arguments)
    run = job.wait()
    assert run.code == 0, run.text()
    assert run.generations == 2
    assert_same_state(run, expected)
    after = (run.out / "after-main.txt").read_text().split("\n")[:-1]
    assert len(after) == 4 and all(line.endswith("False") for line in after), after


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_and_started_again(launch, unbroken, tmp_path, signum):
    arguments = ("--pause-s", "0.05")
    options = (f"--checkpoint-dir={tmp_path / 'c'}", "--checkpoint-every=1000")
    first = launch(*options, arguments=arguments)
    first.wait_until(lambda: len(_steps(first)) >= 10, "ten steps")
    first.signal(signum)
    run = first.wait(15)
    assert run.code == 75, run.text()
    first.assert_nothing_left()
    done = max(_steps(first))

    second = launch(*options, arguments=arguments)
    run = second.wait()
    assert run.code == 0, run.text()
    assert min(_steps(second)) >= done - 1, "started from the beginning"
    assert_same_state(run, unbroken(*arguments))


def _steps(job) -> set[int]:
    return {
        int(line.split()[0])
        for path in job.out.glob("samples-*.txt")
        for line in path.read_text().split("\n")[:-1]
    }


def test_agent_killed_leaves_nothing(launch):
    job = launch(arguments=("--pause-s", "0.05", "--num-workers", "2"))
    job.wait_until(lambda: len(_steps(job)) >= 5, "five steps")
    # the zygote, four ranks with two data workers each, and a spare
    job.wait_until(lambda: len(descendants_of(job.process.pid)) >= 14, "a spare")
    job.signal(signal.SIGKILL)
    assert job.wait().code == -signal.SIGKILL
    job.assert_nothing_left()


def test_with_data_workers(launch, unbroken):
    arguments = ("--num-workers", "2")
    recovered(launch, unbroken, "--inject=kill:rank=2,step=20", arguments=arguments)


def test_a_job_of_four_ranks_goes_on_with_three(launch, unbroken, tmp_path):
    """The global batch of 64 cannot be cut into three: the parts stay those of the first start."""
    base = ("--no-dropout", "--no-batch-norm", "--default-parts")
    options = (f"--checkpoint-dir={tmp_path / 'c'}", "--checkpoint-every=10")
    first = launch(*options, arguments=(*base, "--steps", "20"))
    assert first.wait().code == 0
    run = launch(*options, arguments=(*base, "--steps", "40"), num_ranks=3).wait()
    assert run.code == 0, run.text()
    assert run.effects("PublishPlan")[0]["plan"]["cut"]["step"] == 20
    assert_same_state(run, unbroken(*base), tolerance=1e-4)
