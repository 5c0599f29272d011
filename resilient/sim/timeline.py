"""Simulated time: what is to happen, in order, and nothing else.

Two things at one time happen in the order in which they were asked for, so a run depends on its
seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timeline:
    """A heap of (time, sequence number, action)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> None:
        """Never in the past: what is late happens now."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def run_next(self) -> bool:
        """Lets the next thing happen; False: nothing will ever happen again."""
        if not self._heap:
            return False
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        return True
