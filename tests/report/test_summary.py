"""Numbers from journals: recoveries, phases, causes, time lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.core import events as ev
from resilient.core.model import FaultKind, Outcome, Phase
from resilient.report import Summary, read_journal, summarize, summary_text
from tests.report.journals import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "journal.jsonl")


def summary_of(job: Job) -> Summary:
    return summarize(read_journal(str(job.path)))


def test_unbroken(job: Job) -> None:
    job.start()
    job.finish(11.0, step=100)
    summary = summary_of(job)
    assert summary.outcome is Outcome.DONE
    assert summary.num_steps == 100
    assert summary.recoveries == ()
    assert (summary.world_size, summary.num_generations) == (4, 1)
    assert summary.startup_s == pytest.approx(1.0)
    assert summary.training_s == pytest.approx(10.0)
    assert summary.effective_ratio == 1.0
    text = summary_text(summary)
    assert text.startswith("done: 100 steps in 10.0 s, start-up 1.0 s, 4 ranks")
    assert text.endswith("ratio 1.000")


def test_killed_rank_phases_add_up(job: Job) -> None:
    job.start()
    job.fail(3.002, 1, 40, "builtins.RuntimeError", in_collective=True)  # before the death is seen
    job.die(3.003, rank=2, step=40, began_s=3.0)
    job.interrupt(3.010, 0, 40)
    job.fail(3.012, 3, 40, "builtins.RuntimeError", in_collective=True)
    assert job.state.phase is Phase.RESTORING
    job.enter(3.012, joined_s=3.030, restored_s=3.040)
    job.step_all(3.050, 41)
    job.finish(13.0, step=100)

    summary = summary_of(job)
    (recovery,) = summary.recoveries
    (cause,) = recovery.causes
    assert (cause.kind, cause.rank, cause.status) == (FaultKind.DIED, 2, -9)
    assert {fault.rank for fault in recovery.collateral} == {1, 3}
    assert (recovery.step, recovery.resume_step, recovery.num_redone) == (40, 40, 0)
    seconds = [span for _, span in recovery.phases.items()]
    assert seconds == pytest.approx([0.002, 0.010, 0.0, 0.018, 0.010, 0.010])
    assert sum(s for s in seconds if s is not None) == pytest.approx(recovery.total_s)
    assert recovery.total_s == pytest.approx(0.050)
    assert summary.lost_s == pytest.approx(0.050)
    assert summary.effective_ratio == pytest.approx((12.0 - 0.05) / 12.0)
    text = summary_text(summary)
    assert "recovery 1: rank 2 died (SIGKILL), at step 40: 50 ms" in text
    assert "detect 2, fence 10, agree 0, communicate 18, restore 10, first step 10" in text
    assert "followed from it: ranks 1, 3: RuntimeError" in text


def test_detection_of_a_kill_from_outside_is_unknown(job: Job) -> None:
    job.start()
    job.die(3.0, rank=0, step=40)
    for rank in (1, 2, 3):
        job.interrupt(3.01, rank, 40)
    job.enter(3.01, joined_s=3.02, restored_s=3.03)
    job.step_all(3.04, 41)
    (recovery,) = summary_of(job).recoveries
    assert recovery.phases.detect_s is None
    assert recovery.total_s == pytest.approx(0.04)
    assert "detect unknown, fence 10" in summary_text(summary_of(job))


def test_waiting_for_a_replacement_is_agreeing(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl", num_spares=0)
    job.start()
    job.die(3.0, rank=3, step=5)
    for rank in (0, 1, 2):
        job.interrupt(3.1, rank, 5)
    assert job.state.phase is Phase.COLLECTING
    job.ready_all(3.4)
    job.enter(3.4, joined_s=3.5, restored_s=3.6)
    job.step_all(3.7, 6)
    (recovery,) = summary_of(job).recoveries
    assert recovery.phases.fence_s == pytest.approx(0.1)
    assert recovery.phases.agree_s == pytest.approx(0.3)
    assert recovery.total_s == pytest.approx(0.7)


def test_second_fault_on_the_way_belongs_to_the_recovery(job: Job) -> None:
    job.start()
    job.die(3.0, rank=2, step=40)
    for rank in (0, 1, 3):
        job.interrupt(3.1, rank, 40)
    assert job.state.phase is Phase.RESTORING
    job.feed(3.2, ev.StoreOpened(job.generation + 1, "127.0.0.1", 1002))
    job.die(3.3, rank=0, step=40, status=-11)
    for rank in (1, 2, 3):
        job.interrupt(3.4, rank, 40)
    job.ready_all(3.6)
    job.enter(3.6, joined_s=3.7, restored_s=3.8)
    job.step_all(3.9, 41)
    (recovery,) = summary_of(job).recoveries
    assert [(fault.rank, fault.status) for fault in recovery.causes] == [(2, -9), (0, -11)]
    assert recovery.collateral == ()
    assert recovery.total_s == pytest.approx(0.9)
    spans = [span for _, span in recovery.phases.items() if span is not None]
    assert sum(spans) == pytest.approx(0.9)
    assert "then, on the way: rank 0 died (SIGSEGV)" in summary_text(summary_of(job))


def test_hung_rank_is_the_one_that_had_to_be_killed(job: Job) -> None:
    job.start()
    standing = tuple(job.worker(rank) for rank in job.ranks())
    job.feed(5.0, ev.WorkersHung(0, standing, 40, began_s=3.0, note="stopped"))
    for rank in (0, 2, 3):
        job.interrupt(5.1, rank, 40)
    hung = job.worker(1)
    effects = job.feed(12.0, ev.TimePassed())
    assert any(isinstance(effect, ev.KillWorker) for effect in effects)
    job.feed(12.1, ev.WorkerExited(hung, -9, 40))
    job.enter(12.1, joined_s=12.2, restored_s=12.3)
    job.step_all(12.4, 41)
    (recovery,) = summary_of(job).recoveries
    (cause,) = recovery.causes
    assert (cause.kind, cause.rank, cause.status) == (FaultKind.HUNG, 1, -9)
    assert recovery.phases.detect_s == pytest.approx(2.0)
    assert recovery.total_s == pytest.approx(9.4)
    text = summary_text(summary_of(job))
    assert "rank 1 hung (stopped), at step 40: 9400 ms" in text
    assert "ranks 0, 2, 3: stood still" in text


def test_rank_that_does_not_come_out_after_an_error(job: Job) -> None:
    job.start()
    job.fail(3.0, 0, 40, "builtins.ValueError")
    for rank in (1, 2):
        job.interrupt(3.1, rank, 40)
    stuck = job.worker(3)
    job.feed(30.0, ev.TimePassed())
    job.feed(30.1, ev.WorkerExited(stuck, -9, 40))
    (recovery,) = summary_of(job).recoveries
    assert {fault.kind for fault in (*recovery.causes, *recovery.collateral)} == {
        FaultKind.RAISED,
        FaultKind.HUNG,
    }


def test_same_error_twice_ends_the_job(job: Job) -> None:
    job.start()
    for now_s in (3.0, 4.0):
        job.fail(now_s, 1, 40, "mine.BadSample")
        for rank in (0, 2, 3):
            job.interrupt(now_s + 0.1, rank, 40)
        if now_s == 3.0:
            job.enter(3.1, joined_s=3.2, restored_s=3.3)
    assert job.state.outcome is Outcome.TRAIN_FUNCTION_FAILED
    job.end(4.2, status=1)
    summary = summary_of(job)
    assert summary.outcome is Outcome.TRAIN_FUNCTION_FAILED
    assert summary.root_cause is not None
    assert (summary.root_cause.rank, summary.root_cause.step) == (1, 40)
    lines = summary_text(summary).splitlines()
    assert lines[0].startswith("FAILED: the train function failed")
    assert "cause: rank 1 raised mine.BadSample at train.py:12 in main, at step 40" in lines[2]
    assert "    mine.BadSample: it went wrong" in lines


def test_shrunk_world(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl", replace=False)
    job.start()
    job.die(3.0, rank=1, step=40)
    for rank in (0, 2, 3):
        job.interrupt(3.1, rank, 40)
    job.enter(3.1, joined_s=3.2, restored_s=3.3)
    job.step_all(3.4, 41)
    summary = summary_of(job)
    assert summary.world_size == 3
    assert summary.recoveries[0].world_size == 3
    assert "went on with 3 ranks" in summary_text(summary)


def test_steps_made_again_after_a_cut_from_disk(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl", persists=True, num_spares=4)
    job.start()
    job.feed(2.5, ev.PaceMeasured(0.5))
    for rank in job.ranks():
        job.die(3.0, rank=rank, step=40, persisted_step=30)
    job.ready_all(3.2)
    job.enter(3.2, joined_s=3.3, restored_s=3.4)
    job.step_all(3.5, 31)
    summary = summary_of(job)
    (recovery,) = summary.recoveries
    assert (recovery.step, recovery.resume_step, recovery.num_redone) == (40, 30, 10)
    assert summary.lost_s == pytest.approx(0.5 + 10 * 0.5)
    assert "10 steps made again from step 30" in summary_text(summary)


def test_running_job(job: Job) -> None:
    job.start()
    job.die(3.0, rank=2, step=40)
    summary = summary_of(job)
    assert summary.outcome is None
    (recovery,) = summary.recoveries
    assert recovery.total_s is None
    text = summary_text(summary)
    assert text.startswith("running (stopping): 40 steps")
    assert "at step 40: not ended" in text


def test_drained(job: Job) -> None:
    job.start()
    job.feed(3.0, ev.DrainRequested(15))
    for rank in job.ranks():
        job.interrupt(3.1, rank, 40)
    job.end(3.2, status=75)
    summary = summary_of(job)
    assert summary.outcome is Outcome.DRAINED
    assert summary.recoveries == ()
    assert summary_text(summary).startswith("stopped as asked (SIGTERM): 40 steps")


def test_spare_death_is_a_line(job: Job) -> None:
    job.start()
    (spare,) = [w for w, known in job.state.workers.items() if known.slot is None]
    job.feed(3.0, ev.WorkerExited(spare, -9))
    summary = summary_of(job)
    assert summary.recoveries == ()
    assert "spares that died: 1" in summary_text(summary)


def test_unmodified_script_restarts_then_fails(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl", num_ranks=2, max_restarts=1)
    job.die(1.0, rank=1, step=0, status=3)
    job.feed(1.1, ev.WorkerExited(job.worker(0), -15))
    job.feed(1.2, ev.StoreOpened(1, "127.0.0.1", 1001))
    job.die(2.0, rank=1, step=0, status=3)
    job.feed(2.1, ev.WorkerExited(job.worker(0), -15))
    assert job.state.finished
    summary = summary_of(job)
    assert summary.outcome is Outcome.SCRIPT_FAILED
    assert summary.num_generations == 2
    (restart,) = summary.recoveries
    assert restart.restart
    assert restart.total_s == pytest.approx(0.2)
    text = summary_text(summary)
    assert text.startswith("FAILED: the script failed")
    assert "cause: rank 1 exited with 3" in text
    assert "restart 1: rank 1 exited with 3: 200 ms" in text


def test_unmodified_script_succeeds(tmp_path: Path) -> None:
    job = Job(tmp_path / "journal.jsonl", num_ranks=2)
    job.end(1.0)
    summary = summary_of(job)
    assert summary.outcome is Outcome.DONE
    assert summary.recoveries == ()
    assert summary.effective_ratio is None


def test_empty_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"version":1}\n')
    summary = summarize(read_journal(str(path)))
    assert summary.num_steps == 0
    assert summary_text(summary).startswith("running")
