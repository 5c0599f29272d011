"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.harness import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks the worker processes; torch is imported once, in it, for all tests."""
    process = Zygote()
    yield process
    process.close()
