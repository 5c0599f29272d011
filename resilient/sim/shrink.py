"""Fewer faults, same failure: what of a seed's faults was it that broke the promise?

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
TSE 28(2), 2002, algorithm ddmin): cut the list of faults into n pieces; where one piece, or all but
one piece, still makes the same checker speak, go on with that; else cut finer. The end is a list
from which no single fault can be taken, if the bound on runs was not met before.

A run is a function of its seed and its faults, so the same input always shrinks to the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

MAX_RUNS = 200


class Violation(Protocol):
    @property
    def checker(self) -> str: ...


class Result(Protocol):
    """What shrinking looks at of a simulated run."""

    @property
    def violation(self) -> Violation | None: ...
    @property
    def faults(self) -> Sequence[Any]: ...


R = TypeVar("R", bound=Result)


def shrink(run: Callable[..., R], seed: int, result: R, *, max_runs: int = MAX_RUNS) -> R:
    """The run with the fewest faults that was found to violate the same checker.

    Args:
        run: `run(seed, faults=[...])`, deterministic.
        result: of the failing run, with the faults that happened in it.
        max_runs: how often `run` is called at most.
    Returns:
        A result of `run`; `result` itself where nothing smaller fails.
    Raises:
        ValueError: result violates nothing.
    """
    if result.violation is None:
        raise ValueError(f"seed {seed} violates nothing: there is nothing to shrink")
    checker = result.violation.checker
    tried: set[tuple[int, ...]] = set()

    def fails(indexes: Sequence[int]) -> R | None:
        """The result with these faults only, where it fails in the same way and is news."""
        key = tuple(indexes)
        if key in tried or len(tried) >= max_runs:
            return None
        tried.add(key)
        again = run(seed, faults=[result.faults[index] for index in key])
        same = again.violation is not None and again.violation.checker == checker
        return again if same else None

    nothing = fails(())
    if nothing is not None:
        return nothing  # it needs no fault at all
    best, kept, num_pieces = result, list(range(len(result.faults))), 2
    while len(kept) >= 2 and len(tried) < max_runs:
        for candidate, next_num_pieces in _candidates(kept, num_pieces):
            smaller = fails(candidate)
            if smaller is not None:
                best, kept, num_pieces = smaller, candidate, next_num_pieces
                break
        else:
            if num_pieces >= len(kept):
                break
            num_pieces = min(2 * num_pieces, len(kept))
    return best


def _candidates(kept: Sequence[int], num_pieces: int) -> Iterator[tuple[list[int], int]]:
    """Each piece, then each complement; with the number of pieces to go on with if it fails."""
    bounds = [len(kept) * piece // num_pieces for piece in range(num_pieces + 1)]
    pieces = list(itertools.pairwise(bounds))
    for first, end in pieces:
        yield list(kept[first:end]), 2
    if num_pieces > 2:  # of two pieces, each is the other's complement
        for first, end in pieces:
            yield [*kept[:first], *kept[end:]], max(num_pieces - 1, 2)
