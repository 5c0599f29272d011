"""What holds for every test: nothing it started may outlive the session.

Each process under this session inherits a mark in its environment; whatever still carries it at the
end is a leftover, whoever started it and wherever it was re-parented to, and fails the session.
"""

from __future__ import annotations

import os
import signal
import time
import uuid

import psutil
import pytest

MARK = "RESILIENT_TEST_SESSION"
LEFTOVER_WAIT_S = 10.0


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Several processes a test on few cores: threads of their own would only stand in their way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # only where a test needs to know

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    deadline_s = time.monotonic() + LEFTOVER_WAIT_S
    while (left := _leftovers()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        for line in left:
            reporter.write_line(f"left behind by a test: {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _leftovers() -> list[str]:
    """Living processes that carry this session's mark, one line each."""
    mark, found = os.environ[MARK], []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(MARK) != mark:
                continue
            command = " ".join(process.cmdline())
            if "resource_tracker" in command and process.ppid() == os.getpid():
                continue  # multiprocessing's own; ends with this process
            found.append(f"pid {process.pid}: {command[:200]}")
        except psutil.Error:
            continue  # it has ended, is a zombie, or is not ours
    return found
