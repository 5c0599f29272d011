"""The fixture `launch(*argv)` starts resilient-run; when a test ends nothing of it may be left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.harness import WAIT_S, Launcher, start_server


@pytest.fixture(scope="session")
def _channel() -> Iterator[socket.socket]:
    server, channel = start_server()
    with channel:
        yield channel
    assert server.wait(WAIT_S) == 0


@pytest.fixture
def launch(_channel: socket.socket, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(_channel, tmp_path)
    yield launcher
    assert launcher.clean_up() == {}
