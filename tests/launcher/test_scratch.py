"""Whoever is killed leaves no file behind: not in the temporary directory, not in shared memory."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_run import scratch
from tests.launcher.harness import Launcher, Run, children_of, wait_until

DECORATED = """
import time, torch, resilient
data = torch.utils.data.TensorDataset(torch.randn(64, 4096))
@resilient.train
def main(job):
    net = job.data_parallel(job.build(lambda: torch.nn.Linear(4096, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    batches = job.batches(data, global_batch_size=8, epochs=None, max_steps=10**6, num_workers=2)
    job.protect(net=net, optimizer=optimizer, batches=batches)
    for batch in batches:
        for (inputs,) in batch:
            net(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""

UNMODIFIED = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(64, 4096))
if __name__ == '__main__':
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
    while True:
        for batch in loader:
            pass
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short name: sockets are made in it."""
    path = Path(tempfile.mkdtemp(prefix="r-"))
    yield path
    shutil.rmtree(path)


def left_in_shared_memory(launch: Launcher) -> list[str]:
    mine = tuple(f"torch_{pid}_" for pid in launch.pids)
    return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]


def wait_data_workers(launch: Launcher, run: Run, temporary: Path, num_ranks: int) -> Path:
    """Waits until data workers have handed something over. Returns the job's directory."""

    def sockets() -> list[Path]:
        launch.note_processes()
        return list(temporary.glob("resilient-*/*/listener-*"))

    wait_until(lambda: len(sockets()) >= num_ranks, "data workers have sockets", run._seen)
    (directory,) = temporary.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    return directory


@pytest.mark.parametrize("options", [(), ("--start-method", "spawn")], ids=["fork", "spawn"])
@pytest.mark.parametrize("text", [DECORATED, UNMODIFIED], ids=["decorated", "unmodified"])
def test_nothing_is_left_of_a_rank_that_was_killed(
    launch: Launcher, temporary: Path, text: str, options: tuple[str, ...]
) -> None:
    launch.script(text)
    arguments = ("--nproc-per-node", 2, *options, "script.py")
    run = launch(*arguments, env={"TMPDIR": str(temporary)})
    directory = wait_data_workers(launch, run, temporary, 2)
    pid = run.pids()[1]
    own = next(path for path in directory.iterdir() if path.name == "1")
    os.kill(pid, signal.SIGKILL)
    if text is DECORATED:
        wait_until(lambda: not own.exists(), "its directory is gone")
        wait_until(lambda: run.ask_status()["recoveries"] == 1, "recovered", run._seen)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.stderr
    else:
        assert run.wait() == 128 + 9, run.stderr
    assert list(temporary.iterdir()) == []
    assert left_in_shared_memory(launch) == []


@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_nothing_is_left_of_a_job_that_was_killed(
    launch: Launcher, temporary: Path, victim: str
) -> None:
    launch.script(DECORATED)
    run = launch("--nproc-per-node", 2, "script.py", env={"TMPDIR": str(temporary)})
    wait_data_workers(launch, run, temporary, 2)
    os.kill(run.pid if victim == "agent" else children_of(run.pid)[0], signal.SIGKILL)
    run.wait()
    wait_until(lambda: not launch.left(), "all gone", launch.left)
    wait_until(lambda: not list(temporary.iterdir()), "nothing left", lambda: os.listdir(temporary))
    assert left_in_shared_memory(launch) == []


def test_a_path_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    path = scratch.new_path()
    assert os.path.dirname(path) == "/tmp" and not os.path.exists(path)
    assert len(scratch.of_worker(path, 12345) + "/listener-xxxxxxxx") <= 107


def test_shared_memory_that_a_killed_process_had_just_made(temporary: Path) -> None:
    """The moment between making a file and unlinking it, as torch does, cannot be hit at will."""
    directory = temporary / "job"
    own = directory / "3"
    own.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        scratch._of_this_worker = str(own)
        scratch.note_this_process()
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
        signal.pause()
    file = Path(f"/dev/shm/torch_{pid}_1_0")
    try:
        wait_until(file.exists, "the file is there")
        scratch.remove_of_worker(str(own))
        assert file.exists() and own.exists()  # it may still be needed
    finally:
        os.kill(pid, signal.SIGKILL)
    scratch.remove(str(directory))
    os.waitpid(pid, 0)
    assert not file.exists() and not directory.exists()
