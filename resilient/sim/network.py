"""Who can reach whom, and how long it takes.

Links between a node and the store are cut one direction at a time, links between nodes (the data
plane) both at once. Cuts are counted, so that two faults that cut the same link may overlap. What
is cut loses requests and answers; the store's stream, a connection, waits and goes on.
"""

from __future__ import annotations

from collections import Counter
from random import Random


class Network:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.requests_lost: Counter[str] = Counter()
        self.answers_lost: Counter[str] = Counter()
        self.cut: Counter[tuple[str, str]] = Counter()
        self.slow: Counter[str] = Counter()
        self.store_down = 0
        self.num_cuts = 0

    def is_quiet(self, node: str) -> bool:
        """Nothing is wrong between this node and the store."""
        return not (
            self.store_down
            or self.requests_lost[node]
            or self.answers_lost[node]
            or self.slow[node]
        )

    def can_request(self, node: str) -> bool:
        return not (self.store_down or self.requests_lost[node])

    def can_answer(self, node: str) -> bool:
        return not (self.store_down or self.answers_lost[node])

    def can_reach(self, a: str, b: str) -> bool:
        return not self.cut[(a, b) if a < b else (b, a)]

    def cut_pair(self, a: str, b: str, change: int) -> None:
        self.cut[(a, b) if a < b else (b, a)] += change
        self.num_cuts += change

    def latency_s(self, node: str) -> float:
        """One way, between the node and the store."""
        if self.slow[node]:
            return self._rng.uniform(0.5, 8.0)
        return self._rng.uniform(0.0005, 0.003)
