"""`resilient report` and `resilient status`: what they print, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilient.cli import main
from resilient.report import cli
from tests.report.journals import Job, code_without_a_reader

ROOT = Path(__file__).resolve().parents[2]
NOW = {
    "phase": "running",
    "generation": 1,
    "world_size": 2,
    "steps": {"0": 57, "1": 56},
    "pids": {"0": 7, "1": 8},
    "spares": 1,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "none_x"
    run.mkdir()
    job = Job(run / "journal.jsonl")
    job.start()
    job.die(3.0, rank=2, step=40, began_s=2.9)
    for rank in (0, 1, 3):
        job.interrupt(3.1, rank, 40)
    job.enter(3.1, joined_s=3.2, restored_s=3.3)
    job.step_all(3.4, 41)
    return run


def test_report(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir.parent)]) == 0
    out = capsys.readouterr().out
    assert "recovery 1: rank 2 died (SIGKILL), at step 40: 500 ms" in out
    assert out.endswith(f"\njournal: {run_dir / 'journal.jsonl'}\n"), "the one it chose"
    assert main(["report", str(run_dir / "journal.jsonl")]) == 0
    assert "journal:" not in capsys.readouterr().out, "it was named"


def test_report_that_nobody_reads(run_dir: Path) -> None:
    assert code_without_a_reader(["report", str(run_dir)]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("resilient ")


def test_report_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", str(run_dir)]) == 0
    value = json.loads(capsys.readouterr().out)
    (recovery,) = value["recoveries"]
    assert recovery["causes"][0]["rank"] == 2
    assert recovery["phases_s"]["detect"] == pytest.approx(0.1)
    assert value["num_steps"] == 41


def test_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("resilient: no journal.jsonl in")


def test_status_of_a_job_whose_agent_is_gone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no agent answers: the job was killed\nrunning (running): 41 steps")


def test_status_asks_the_agent(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(run_dir, os.O_PATH)
        server.bind(f"/proc/self/fd/{directory}/{cli.STATUS_SOCKET}")
        os.close(directory)
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps(NOW).encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["status", str(run_dir)]) == 0
        thread.join(timeout=10)
    out = capsys.readouterr().out
    assert out.startswith(
        "now: running, generation 1, 2 ranks, 1 spares\n  rank 0: 57 steps, pid 7\n"
    )
    assert "recovery 1" in out


def test_no_command_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: resilient" in capsys.readouterr().err


def test_it_starts_at_once() -> None:
    """Looking at a job must not wait for torch."""
    code = "import resilient.cli, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
