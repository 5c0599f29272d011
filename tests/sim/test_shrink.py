"""Fewest faults that still break the same promise, within a bound, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from resilient.sim.shrink import shrink


@dataclass(frozen=True)
class Violation:
    checker: str


@dataclass(frozen=True)
class Result:
    faults: tuple[int, ...]
    violation: Violation | None


class World:
    """Fails where all guilty faults happen; with `other`, another checker speaks first."""

    def __init__(self, guilty: Sequence[int], other: int | None = None) -> None:
        self.guilty, self.other = set(guilty), other
        self.runs: list[tuple[int, ...]] = []

    def __call__(self, seed: int, *, faults: Sequence[int]) -> Result:
        self.runs.append(tuple(faults))
        if self.other is not None and self.other not in faults and len(faults) > 3:
            return Result(tuple(faults), Violation("another"))
        broken = self.guilty <= set(faults)
        return Result(tuple(faults), Violation("promise") if broken else None)


def whole(num_faults: int) -> Result:
    return Result(tuple(range(num_faults)), Violation("promise"))


@pytest.mark.parametrize("guilty", [[0], [39], [17], [3, 30], [0, 1, 2], [5, 19, 20, 38]])
def test_exactly_the_guilty_faults_are_left(guilty: list[int]) -> None:
    world = World(guilty)
    assert shrink(world, 7, whole(40)).faults == tuple(guilty)
    assert len(world.runs) < 200
    assert len(set(world.runs)) == len(world.runs), "nothing is run twice"


def test_a_run_that_fails_without_faults() -> None:
    world = World([])
    assert shrink(world, 7, whole(40)).faults == ()
    assert len(world.runs) == 1


def test_no_fault_can_be_taken_from_what_is_left() -> None:
    rng = Random(11)
    for _ in range(30):
        num_faults = rng.randrange(1, 40)
        world = World(rng.sample(range(num_faults), rng.randrange(1, min(num_faults, 6) + 1)))
        found = shrink(world, 7, whole(num_faults), max_runs=10_000)
        assert set(found.faults) == world.guilty


def test_another_checker_is_another_failure() -> None:
    world = World([3], other=9)
    found = shrink(world, 7, whole(40))
    assert found.violation == Violation("promise")
    assert 3 in found.faults


def test_the_bound_on_runs() -> None:
    world = World(range(0, 40, 2))
    found = shrink(world, 7, whole(40), max_runs=25)
    assert len(world.runs) == 25
    assert world.guilty <= set(found.faults)
    assert found.violation is not None


def test_what_cannot_be_made_smaller_is_given_back() -> None:
    result = whole(2)
    assert shrink(World([0, 1]), 7, result) is result


def test_it_shrinks_the_same_way_each_time() -> None:
    first, second = World([4, 22, 31]), World([4, 22, 31])
    assert shrink(first, 7, whole(40)) == shrink(second, 7, whole(40))
    assert first.runs == second.runs


def test_nothing_to_shrink() -> None:
    with pytest.raises(ValueError, match="seed 7 violates nothing"):
        shrink(World([1]), 7, Result((1, 2), None))
