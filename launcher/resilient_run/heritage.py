"""What outlives a worker in the agent's memory: its progress page, and which drills it has had.

The one idea: a rank's own random state is in the page of the process that held the rank, so whoever
takes the rank next is given that page. If that process died before it had restored anything, its
page is empty, and the one before it counts: hence a short list for each rank, newest last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from resilient.core import drills
from resilient.core.model import Plan, Worker
from resilient.page import Page

NUM_KEPT = 3


def _bits(word: int) -> list[int]:
    return [index for index in range(word.bit_length()) if word >> index & 1]


class Heritage:
    def __init__(self) -> None:
        self._by_rank: dict[int, list[tuple[Worker, Page]]] = {}
        self._dead: set[Worker] = set()
        self._restored: set[Worker] = set()
        self._drills_struck: Counter[int] = Counter()

    def drills_left(self, specs: Sequence[str], living: Iterable[Page]) -> tuple[str, ...]:
        """The drills that are still to strike. A drill's number is its place: the others are "".

        A process that lives counts its own strikes; here each process counts once a drill.
        """
        if not specs:
            return ()
        struck = Counter(self._drills_struck)
        for page in living:
            struck.update(_bits(page.read().drills_fired))
        return tuple(
            spec if struck[index] < drills.parse(spec).times else ""
            for index, spec in enumerate(specs)
        )

    def enter(self, plan: Plan, pages: dict[Worker, Page]) -> None:
        """From now on these workers hold these ranks."""
        for member in plan.members:
            held = self._by_rank.setdefault(member.rank, [])
            if member.worker in pages and not (held and held[-1][0] == member.worker):
                held.append((member.worker, pages[member.worker]))

    def predecessor(self, plan: Plan, rank: int, worker: Worker) -> Page | None:
        """The page with the rank's own state at the plan's cut; None: the worker needs none.

        One that was given the rank before and never got as far as to restore still needs it.
        """
        held = self._by_rank.get(rank, [])
        if worker in self._restored:
            return None
        for former, page in reversed(held):
            if former != worker and page.kept(plan.cut.step) is not None:
                return page
        return None

    def restored(self, worker: Worker) -> None:
        """It has state of its own from now on."""
        self._restored.add(worker)

    def bury(self, worker: Worker, page: Page) -> None:
        """The worker is gone; its page is closed once nobody can need it any more."""
        self._drills_struck.update(_bits(page.read().drills_fired))
        self._dead.add(worker)
        self._restored.discard(worker)
        if not any(worker == w for held in self._by_rank.values() for w, _ in held):
            self._dead.discard(worker)
            page.close()
        self._prune()

    def _prune(self) -> None:
        for rank, held in self._by_rank.items():
            surplus, kept = held[:-NUM_KEPT], held[-NUM_KEPT:]
            self._by_rank[rank] = kept
            for worker, page in surplus:
                still = any(worker == w for h in self._by_rank.values() for w, _ in h)
                if worker in self._dead and not still:
                    self._dead.discard(worker)
                    page.close()
