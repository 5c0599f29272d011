"""One unbroken run a set of arguments, shared by all the tests that compare with it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.harness import WAIT_S, Launcher, start_server
from tests.recovery.harness import Launch, Run


@pytest.fixture(scope="session")
def channel() -> Iterator[socket.socket]:
    server, channel = start_server()
    with channel:
        yield channel
    assert server.wait(WAIT_S) == 0


@pytest.fixture(scope="session")
def unbroken(
    channel: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    launcher = Launcher(channel, tmp_path_factory.mktemp("unbroken"))
    runs: dict[tuple[object, ...], Run] = {}

    def get(*arguments: str, num_ranks: int = 4) -> Run:
        key = (arguments, num_ranks)
        if key not in runs:
            run = Launch(launcher, arguments=arguments, num_ranks=num_ranks).wait()
            assert run.code == 0, run.text()
            assert run.generations == 1, run.text()
            runs[key] = run
        return runs[key]

    return get


@pytest.fixture
def launch(channel: socket.socket, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Starts a job; whatever the test does, nothing of it is left afterwards."""
    launcher = Launcher(channel, tmp_path)
    yield lambda *options, **keywords: Launch(launcher, *options, **keywords)
    assert launcher.clean_up() == {}
