"""The simulator's checkers bite: each mistake that is programmed into the core is found."""

from __future__ import annotations

import pytest

from resilient.sim.run import run
from tests.sim.mutants import MAX_SEEDS, MUTANTS, find, table

FAST = [name for name, mutant in MUTANTS.items() if not mutant.slow]
SLOW = [name for name, mutant in MUTANTS.items() if mutant.slow]

MIN_MUTATIONS = 16
MIN_CHECKERS = 6


def expect_found(name: str) -> None:
    assert find(name) is not None, f"{MAX_SEEDS} seeds did not notice: {MUTANTS[name].mistake}"


@pytest.mark.parametrize("name", FAST)
def test_a_mistake_is_found(name: str) -> None:
    expect_found(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_a_mistake_that_is_rarely_of_consequence_is_found(name: str) -> None:
    expect_found(name)


def test_many_promises_find_something() -> None:
    """Also prints the table (pytest -s)."""
    found = [one for one in map(find, FAST) if one is not None]
    print(f"\n{table(FAST)}")
    assert len(found) >= MIN_MUTATIONS
    checkers = {one.checker for one in found} - {"exception"}
    assert len(checkers) >= MIN_CHECKERS, f"the same few find everything: {sorted(checkers)}"


def test_a_mutation_is_gone_afterwards() -> None:
    mutant = MUTANTS["waits without a bound"]
    before = run(0, num_nodes=1)
    assert before.violation is None, before.violation
    with mutant.applied():
        assert run(0, num_nodes=1).violation is not None
    assert run(0, num_nodes=1).trace_hash == before.trace_hash
