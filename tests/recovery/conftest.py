"""One unbroken run a set of arguments, shared by all the tests that compare with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .harness import Launch, Run


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    runs: dict[tuple, Run] = {}

    def get(*arguments: str, num_ranks: int = 4) -> Run:
        key = (arguments, num_ranks)
        if key not in runs:
            out = tmp_path_factory.mktemp("unbroken")
            run = Launch(out, arguments=arguments, num_ranks=num_ranks).wait()
            assert run.code == 0, run.text()
            assert run.generations == 1, run.text()
            runs[key] = run
        return runs[key]

    return get


@pytest.fixture
def launch(tmp_path) -> Iterator[Callable[..., Launch]]:
    """Starts a job; whatever the test does, nothing of it is left afterwards."""
    started: list[Launch] = []

    def start(*options: str, **keywords) -> Launch:
        job = Launch(tmp_path / f"job-{len(started)}", *options, **keywords)
        started.append(job)
        return job

    yield start
    for job in started:
        alive = job.process.poll() is None
        job.kill()
        job.assert_nothing_left()
        assert not alive, f"the test left its job running\n{job.output()}"
