"""The report on real jobs: the launcher's own journals, read back by the command a user types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import sys, time
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import resilient

torch.set_num_threads(1)
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)),
                     torch.arange(64) % 2)

@resilient.train
def main(job):
    model = job.data_parallel(job.build(lambda: torch.nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = job.batches(data, global_batch_size=8, epochs=None, max_steps=int(sys.argv[1]))
    job.protect(model=model, optimizer=optimizer, batches=batches)
    for batch in batches:
        for inputs, targets in batch:
            F.cross_entropy(model(inputs), targets).backward()
        time.sleep(float(sys.argv[2]))
        optimizer.step()
        optimizer.zero_grad()

main()
"""

PLAIN = """
import os, sys
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "OMP_NUM_THREADS": "1"}


def launch(tmp_path: Path, source: str, *options: str, arguments: tuple[str, ...] = ()):
    script = tmp_path / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "resilient_run.cli", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path / 'logs'}", *options, str(script), *arguments]
    return subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def look(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "resilient.cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_rank_is_reported_with_phases_that_add_up(tmp_path: Path) -> None:
    with launch(
        tmp_path, TRAIN, "--inject=kill:rank=1,step=5", arguments=("20", "0.01")
    ) as process:
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    value = json.loads(look("report", "--json", str(tmp_path / "logs")))
    assert value["outcome"] == "done"
    assert value["num_steps"] == 20
    (recovery,) = value["recoveries"]
    (cause,) = recovery["causes"]
    assert (cause["kind"], cause["rank"], cause["status"], cause["step"]) == ("died", 1, -9, 5)
    assert (recovery["step"], recovery["resume_step"]) == (5, 5)
    phases = recovery["phases_s"]
    assert all(span is not None and span >= 0 for span in phases.values()), phases
    assert sum(phases.values()) == pytest.approx(recovery["total_s"], abs=1e-6)
    assert recovery["total_s"] < 30
    assert 0 < value["effective_training_time_ratio"] < 1
    report = look("report", str(tmp_path / "logs"))
    assert "recovery 1: rank 1 died (SIGKILL), at step 5" in report
    text, _, path = report.partition("\njournal: ")
    assert text in stderr, "the end of a run prints the same"
    assert path.strip().endswith("journal.jsonl"), "and the report of a directory which one it is"


def test_an_unmodified_script_that_restarts(tmp_path: Path) -> None:
    with launch(tmp_path, PLAIN, "--max-restarts=1") as process:
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    report = look("report", str(tmp_path / "logs"))
    assert report.startswith("done: 2 ranks, 2 generations\nrestart 1: rank 1 exited with 3")


def test_status_of_a_running_job(tmp_path: Path) -> None:
    with launch(tmp_path, TRAIN, arguments=("100000", "0.02")) as process:
        try:
            deadline_s = time.monotonic() + 60
            status = ""
            while "now: running" not in status:
                assert process.poll() is None and time.monotonic() < deadline_s, status
                if list(tmp_path.glob("logs/*/journal.jsonl")):
                    status = look("status", str(tmp_path / "logs"))
            assert "generation 0, 2 ranks" in status
            assert "  rank 1: " in status
        finally:
            process.terminate()
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert look("status", str(tmp_path / "logs")).startswith("stopped as asked (SIGTERM)")
