"""The generation loop with real processes: what a worker answers, and that the result is exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import wire
from resilient.core.model import Holding
from resilient.worker.train import CHECKPOINT_VARIABLE
from tests.worker.harness import Agent, Worker, Zygote, memory

TOY = Path(__file__).with_name("toy.py")
STEPS = 12


def lines(directory: Path, name: str) -> list[list[str]]:
    path = directory / name
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> str:
    """Digest of the final parameters of a run in which nothing happens."""
    directory = tmp_path_factory.mktemp("unbroken")
    with Agent(directory, zygote) as agent:
        workers = agent.launch(TOY, 4, OUT=str(directory))
        agent.start(0, workers)
        reports = agent.wait_all(wire.Finished, 0, workers)
        assert [report.step for report in reports] == [STEPS] * 4
        for worker in workers:
            kinds = [type(message) for _, message in worker.messages]
            assert kinds == [wire.Ready, wire.Joined, wire.Restored, wire.Stepped, wire.Finished]
            assert worker.of(wire.Stepped)[0].step == 1
        agent.close()
    finals = lines(directory, "final")
    assert len(finals) == 4 and len({final[2] for final in finals}) == 1
    return finals[0][2]


def finish(
    agent: Agent, generation: int, ranks: list[Worker], directory: Path, expected: str
) -> None:
    """Waits until all have finished, closes, and compares the parameters."""
    agent.wait_all(wire.Finished, generation, ranks)
    agent.close()
    finals = {final[0]: final[1:] for final in lines(directory, "final")}
    assert finals == {str(rank): [str(STEPS), expected] for rank in range(len(ranks))}
    assert sorted(pid for (pid,) in lines(directory, "after")) == sorted(
        str(worker.pid) for worker in ranks
    )


def cut_of(reports: list[wire.Interrupted], ranks: list[Worker], new: list[Worker]):
    """As the coordinator does: the newest step that somebody holds, and who does."""
    steps = {holding.step for report in reports for holding in report.holdings}
    step = max(steps)
    holders = [
        new.index(worker)
        for worker, report in zip(ranks, reports, strict=True)
        if any(holding.step == step for holding in report.holdings)
    ]
    return memory(step, *sorted(holders))


def test_a_waiting_worker_looks_at_the_disk_when_it_is_asked(
    tmp_path: Path, zygote: Zygote
) -> None:
    """What was written since it was ready, by ranks that may be gone with their node."""
    directory = tmp_path / "checkpoints"
    with Agent(tmp_path, zygote) as agent:
        environment = {"OUT": str(tmp_path), CHECKPOINT_VARIABLE: f"{directory},0"}
        rank, spare = agent.launch(TOY, 2, **environment)
        assert spare.of(wire.Ready)[0].persisted_step is None
        agent.tell(wire.Look(), spare)
        agent.wait(lambda: spare.of(wire.Persisted), "an answer")
        assert spare.of(wire.Persisted)[0].step is None
        agent.start(0, [rank])
        agent.wait_all(wire.Finished, 0, [rank])
        agent.tell(wire.Persist(STEPS), rank)
        agent.wait(lambda: rank.of(wire.Persisted), "a checkpoint")
        assert rank.of(wire.Persisted)[0].step == STEPS
        agent.tell(wire.Look(), spare)
        agent.wait(lambda: len(spare.of(wire.Persisted)) == 2, "another answer")
        assert spare.of(wire.Persisted)[1].step == STEPS
        agent.close()


def test_a_killed_rank_is_replaced(tmp_path: Path, zygote: Zygote, unbroken: str) -> None:
    with Agent(tmp_path, zygote) as agent:
        workers = agent.launch(TOY, 5, OUT=str(tmp_path), TOY="slow")
        spare, ranks = workers[4], workers[:4]
        agent.start(0, ranks)
        victim = ranks[2]
        agent.wait(lambda: victim.page.read().step >= 5, "step 5")
        agent.kill(victim)
        agent.abort(0)
        survivors = [ranks[0], ranks[1], ranks[3]]
        reports = answers(agent, 0, survivors)
        new = [ranks[0], ranks[1], spare, ranks[3]]
        agent.start(1, new, cut_of(reports, survivors, new), predecessors={2: victim.page})
        finish(agent, 1, new, tmp_path, unbroken)
        assert spare.of(wire.Restored, 1)


def answers(agent: Agent, generation: int, ranks: list[Worker]) -> list:
    """The one report of each: Interrupted, Failed or Finished."""
    kinds = (wire.Interrupted, wire.Failed, wire.Finished)

    def of(worker: Worker) -> list:
        return [report for kind in kinds for report in worker.of(kind, generation)]

    agent.wait(lambda: all(of(worker) for worker in ranks), f"reports on generation {generation}")
    found = [of(worker) for worker in ranks]
    assert all(len(reports) == 1 for reports in found), found
    return [reports[0] for reports in found]


def test_an_exception_is_reported_and_the_same_process_goes_on(
    tmp_path: Path, zygote: Zygote, unbroken: str
) -> None:
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path), TOY="raise")
        agent.start(0, ranks)
        (failed,) = agent.wait_all(wire.Failed, 0, [ranks[1]])
        agent.abort(0)
        reports = answers(agent, 0, ranks)
        assert failed.error.type_name == "builtins.ValueError"
        assert failed.error.frame.startswith(str(TOY)) and " in train" in failed.error.frame
        assert "the toy's own" in failed.error.text and "resilient/worker" not in failed.error.text
        assert not failed.in_collective
        assert failed.step == 5 and failed.holdings == (Holding(5, "live", 0),)
        agent.start(1, ranks, cut_of(reports, ranks, ranks))
        finish(agent, 1, ranks, tmp_path, unbroken)


def test_an_error_that_ends_the_job_is_raised_out_of_main(tmp_path: Path, zygote: Zygote) -> None:
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path), TOY="raise-always")
        agent.start(0, ranks)
        agent.wait_all(wire.Failed, 0, [ranks[1]])
        agent.abort(0)
        reports = answers(agent, 0, ranks)
        assert [type(report) for report in reports].count(wire.Failed) == 1, reports
        agent.tell(wire.Stop(1, "the same error again"))
        agent.wait(lambda: not agent.alive, "the end of all")
        assert [worker.status for worker in ranks] == [1, 1, 1, 1]
        assert "ValueError: the toy's own" in ranks[1].log.read_text()
        others = [ranks[0], ranks[2], ranks[3]]
        assert all("Traceback" not in worker.log.read_text() for worker in others)


def test_a_swallowed_error_is_met_again(tmp_path: Path, zygote: Zygote, unbroken: str) -> None:
    with Agent(tmp_path, zygote) as agent:
        workers = agent.launch(TOY, 5, OUT=str(tmp_path), TOY="swallow slow")
        ranks = workers[:4]
        agent.start(0, ranks)
        agent.wait(lambda: ranks[0].page.read().step >= 4, "step 4")
        agent.kill(ranks[3])
        agent.wait(lambda: lines(tmp_path, "swallowed"), "an error to be swallowed")
        agent.abort(0)
        reports = answers(agent, 0, ranks[:3])
        assert all(isinstance(report, wire.Interrupted) for report in reports), reports
        new = [*ranks[:3], workers[4]]
        cut = cut_of(reports, ranks[:3], new)
        agent.start(1, new, cut, predecessors={3: ranks[3].page})
        finish(agent, 1, new, tmp_path, unbroken)


@pytest.mark.parametrize("at", ["joining", "building", "restoring"])
def test_a_second_fault_during_recovery(
    tmp_path: Path, zygote: Zygote, unbroken: str, at: str
) -> None:
    """The replacement stops itself in each phase; the survivors come out, with their state."""
    with Agent(tmp_path, zygote) as agent:
        workers = agent.launch(TOY, 6, OUT=str(tmp_path), TOY="slow gather-in-main")
        ranks = workers[:4]
        agent.start(0, ranks)
        agent.wait(lambda: ranks[0].page.read().step >= 4, "step 4")
        agent.kill(ranks[1])
        agent.abort(0)
        survivors = [ranks[0], ranks[2], ranks[3]]
        reports = answers(agent, 0, survivors)
        new = [ranks[0], workers[4], ranks[2], ranks[3]]
        cut = cut_of(reports, survivors, new)
        drill = f"stop:rank=1,generation=1,at={at}"
        agent.start(1, new, cut, drills=[drill], predecessors={1: ranks[1].page})
        agent.wait(lambda: workers[4].page.read().fault_ns, "the drill to strike")
        agent.abort(1, *survivors)
        again = answers(agent, 1, survivors)
        assert all(isinstance(report, wire.Interrupted) for report in again), again
        held = [{holding.step for holding in report.holdings} for report in again]
        assert all(cut.step in held[new_index] for new_index in range(3)), held
        agent.kill(workers[4])
        new[1] = workers[5]
        agent.start(2, new, cut_of(again, survivors, new), predecessors={1: ranks[1].page})
        finish(agent, 2, new, tmp_path, unbroken)


def test_an_abort_before_the_entry_is_honoured(
    tmp_path: Path, zygote: Zygote, unbroken: str
) -> None:
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path))
        for worker in ranks:
            os.kill(worker.pid, signal.SIGSTOP)
        agent.start(0, ranks)
        agent.abort(0)
        for worker in ranks:
            os.kill(worker.pid, signal.SIGCONT)
        reports = answers(agent, 0, ranks)
        assert all(isinstance(report, wire.Interrupted) for report in reports), reports
        assert all(report.holdings == () and report.step == 0 for report in reports)
        agent.start(1, ranks)
        finish(agent, 1, ranks, tmp_path, unbroken)


def test_a_finished_rank_is_entered_again(tmp_path: Path, zygote: Zygote, unbroken: str) -> None:
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path), TOY="wait-at-end")
        agent.start(0, ranks)
        done = [ranks[0], ranks[2], ranks[3]]
        agent.wait_all(wire.Finished, 0, done)
        agent.abort(0)
        reports = answers(agent, 0, ranks)
        assert isinstance(reports[1], wire.Interrupted)
        assert {report.step for report in reports} == {STEPS}
        agent.start(1, ranks, cut_of(reports, ranks, ranks))
        agent.wait_all(wire.Finished, 1, ranks)
        agent.close()
        assert {tuple(final[1:]) for final in lines(tmp_path, "final")} == {(str(STEPS), unbroken)}
        assert len(lines(tmp_path, "after")) == 4
        assert len({entry[0] for entry in lines(tmp_path, "entries")}) == 4


def test_a_signal_asks_to_drain_even_inside_a_collective(tmp_path: Path, zygote: Zygote) -> None:
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path), TOY="stop-after-restore")
        agent.start(0, ranks)
        agent.wait_all(wire.Restored, 0, ranks)
        for worker in (ranks[0], ranks[1]):
            agent.kill(worker, signal.SIGTERM if worker is ranks[0] else signal.SIGINT)
            agent.wait(lambda worker=worker: worker.of(wire.DrainRequest), "a request to drain")
        assert ranks[0].of(wire.DrainRequest) == [wire.DrainRequest(signal.SIGTERM)]
        assert ranks[1].of(wire.DrainRequest) == [wire.DrainRequest(signal.SIGINT)]
        agent.abort(0, ranks[0], ranks[1], ranks[3])
        answers(agent, 0, [ranks[0], ranks[1], ranks[3]])
        agent.tell(wire.Stop(75, "drained"), ranks[0], ranks[1], ranks[3])
        agent.kill(ranks[2])
        agent.wait(lambda: not agent.alive, "the end of all")
        assert [ranks[i].status for i in (0, 1, 3)] == [75, 75, 75]


def test_modules_that_main_initialises_itself(tmp_path: Path, zygote: Zygote) -> None:
    """They are built anew at each entry, and the trained weights survive it."""
    results = []
    for num_aborts in (0, 2):
        directory = tmp_path / str(num_aborts)
        directory.mkdir()
        with Agent(directory, zygote) as agent:
            ranks = agent.launch(TOY, 4, OUT=str(directory), TOY="own-init slow")
            agent.start(0, ranks)
            for generation in range(num_aborts):
                wait_step(agent, ranks[0], 3 + 3 * generation)
                agent.abort(generation)
                reports = answers(agent, generation, ranks)
                agent.start(generation + 1, ranks, cut_of(reports, ranks, ranks))
            agent.wait_all(wire.Finished, num_aborts, ranks)
            agent.close()
            results.append({tuple(final[1:]) for final in lines(directory, "final")})
    assert len(results[0]) == 1 and results[0] == results[1]


def wait_step(agent: Agent, worker: Worker, step: int) -> None:
    agent.wait(lambda: worker.page.read().step >= step, f"step {step} of {worker.told()}")


def resources(worker: Worker) -> tuple[int, int]:
    """Open descriptors and threads."""
    base = Path(f"/proc/{worker.pid}")
    return len(list((base / "fd").iterdir())), len(list((base / "task").iterdir()))


def test_nothing_grows_over_many_generations(tmp_path: Path, zygote: Zygote, unbroken: str) -> None:
    num_generations = 50
    with Agent(tmp_path, zygote) as agent:
        ranks = agent.launch(TOY, 4, OUT=str(tmp_path), STEPS="100000")
        cut, seen = None, []
        for generation in range(num_generations):
            agent.start(generation, ranks, *([cut] if cut else []))
            agent.wait_all(wire.Stepped, generation, ranks)
            seen.append([resources(worker) for worker in ranks])
            agent.abort(generation)
            cut = cut_of(answers(agent, generation, ranks), ranks, ranks)
            agent.stores.pop(generation)
        assert seen[-1] == seen[4], seen
        agent.tell(wire.Stop(1, "enough"))
        agent.wait(lambda: not agent.alive, "the end of all")


# ---------------------------------------------------------------- without an agent


def run_alone(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, str(TOY)],
        env={**os.environ, "OUT": str(directory), "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_any_launcher_one_rank_trains(tmp_path: Path) -> None:
    run = run_alone(tmp_path, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("launched without resilient-run") == 1
    assert [final[:2] for final in lines(tmp_path, "final")] == [["0", str(STEPS)]]


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, resilient; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
