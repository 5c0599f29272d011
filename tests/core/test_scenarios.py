"""Every script under testdata/ must run exactly as it says. See scenario.py for the language."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import scenario

FILES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected = path.read_text()
    assert scenario.run(expected).splitlines() == expected.splitlines()


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 120


def test_a_wrong_expectation_is_noticed() -> None:
    text = "fresh 1\n  > open-store 7\n"
    assert scenario.run(text) != text
