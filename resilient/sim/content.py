"""What a worker's state *is*, for the checkers: a node in a tree of commits.

A step's result depends on the state before it and on nothing else that matters here, so a state is
its history: the state it was made from, and the generation in which it was committed. Two ranks
hold the same parameters if and only if they hold the same node. A node is an int; the tables are
here.
"""

from __future__ import annotations

ROOT = 0
"""Before the first step; every rank begins with it."""


class Contents:
    """All states there ever were.

    A run of commits in one generation is a *stretch*; a node's base is the node its stretch was
    restored from, so that a walk to the root takes as many hops as there were generations.
    """

    def __init__(self) -> None:
        self.steps = [0]
        self.parents = [-1]
        self.generations = [-1]
        self._bases = [-1]
        self._known: dict[tuple[int, int], int] = {}

    def commit(self, before: int, generation: int) -> int:
        """The state after one more step in that generation."""
        key = (before, generation)
        found = self._known.get(key)
        if found is not None:
            return found
        node = self._known[key] = len(self.steps)
        self.steps.append(self.steps[before] + 1)
        self.parents.append(before)
        self.generations.append(generation)
        same = self.generations[before] == generation
        self._bases.append(self._bases[before] if same else before)
        return node

    def is_ancestor(self, old: int, new: int) -> bool:
        """Whether `new` was made from `old`, or is it."""
        while self.steps[new] >= self.steps[old]:
            if new == old:
                return True
            base = self._bases[new]
            if base < 0:
                return False
            if self.steps[base] < self.steps[old]:  # in this stretch, if at all
                same = self.generations[old] == self.generations[new]
                return same and self._bases[old] == base
            new = base
        return False
