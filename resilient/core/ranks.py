"""Sets of ranks as whole numbers: bit r says that rank r is in the set.

A world of 80,000 ranks is a number of 10 kB, and `&`, `|` and `~` on it cost about a microsecond.
So a decision about "everybody but two" costs the same as one about two. A set is walked through
only where something has to be said to, or about, each of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

Ranks: TypeAlias = int
"""A set of ranks. `a & b`, `a | b`, `a & ~b` are the set operations; 0 is the empty set."""

_FEW = 16  # up to this many ranks, looking for each is faster than writing the set out


def bit(rank: int) -> Ranks:
    """The set of this one rank."""
    return 1 << rank


def full(world_size: int) -> Ranks:
    """The ranks 0..world_size-1."""
    return (1 << world_size) - 1


def count(ranks: Ranks) -> int:
    return ranks.bit_count()


def has(ranks: Ranks, rank: int) -> bool:
    return bool(ranks >> rank & 1)


def from_ranks(ranks: Iterable[int]) -> Ranks:
    """The set of these ranks, in any order."""
    listed = list(ranks)
    if len(listed) <= _FEW:
        found = 0
        for rank in listed:
            found |= 1 << rank
        return found
    digits = bytearray(b"0") * (max(listed) + 1)
    for rank in listed:
        digits[-1 - rank] = 49  # "1"
    return int(digits, 2)


def from_spans(spans: Iterable[tuple[int, int]]) -> Ranks:
    """The set of the ranks first..last of each span, both ends included."""
    found = 0
    for first, last in spans:
        found |= full(last - first + 1) << first
    return found


def spans(ranks: Ranks) -> tuple[tuple[int, int], ...]:
    """The set as (first, last) of its unbroken runs, ascending; the inverse of `from_spans`."""
    digits = bin(ranks)[:1:-1]  # rank 0 first; looking for a digit is a search in memory
    found = []
    first = digits.find("1")
    while first >= 0:
        end = digits.find("0", first)
        if end < 0:
            end = len(digits)
        found.append((first, end - 1))
        first = digits.find("1", end)
    return tuple(found)


def iterate(ranks: Ranks) -> Iterator[int]:
    """The ranks of the set, ascending."""
    if ranks.bit_count() <= _FEW:
        return _each(ranks)
    return chain.from_iterable(range(first, last + 1) for first, last in spans(ranks))


def _each(ranks: Ranks) -> Iterator[int]:
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest


def show(ranks: Ranks) -> str:
    """ "0-3,7"; "-" for nobody. For people: str() of a large set is refused by Python."""
    shown = (str(a) if a == b else f"{a}-{b}" for a, b in spans(ranks))
    return ",".join(shown) or "-"
