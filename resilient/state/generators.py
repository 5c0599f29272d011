"""This rank's random number generators at its last steps, and where they outlive the process.

The one idea: they are the only state that no twin has. So they are kept at each commit in the page
that the agent holds, and already once before: when the last gradients of a step leave, for from
then on another rank may commit the step, and this one, if it is killed, must come back with its own
generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient.page import Page
from resilient.state.rng import RandomState, seed_all


class Generators:
    """Those of the last two steps.

    Attributes:
        by_step: what they were at so many committed steps.
    """

    def __init__(self, page: Page | None, note: Callable[[str], None]) -> None:
        self.by_step: dict[int, bytes] = {}
        self._page = page
        self._note = note
        self._random = RandomState()
        self._newest: tuple[int, bytes] = (-1, b"")  # of what the page was given

    def keep(self, step: int) -> None:
        """As they are now, for `step` committed steps."""
        rng = self._random.read()
        self.by_step[step] = rng
        if self._page is not None and (self._newest[0] != step or self._newest[1] is not rng):
            self._page.keep(step, rng)
            self._newest = (step, rng)

    def forget(self, before_step: int, after_step: int) -> None:
        for step in [s for s in self.by_step if not before_step <= s <= after_step]:
            del self.by_step[step]

    def rewind(self, step: int) -> None:
        """Sets them to what they were at that step, if it is known."""
        if step in self.by_step:
            self._random.write(self.by_step[step])

    def restore(
        self,
        step: int,
        rank: int,
        predecessor: Page | None,
        on_disk: Callable[[int], bytes | None] = lambda step: None,
    ) -> None:
        """The same; for a rank that had another process, from that one's page."""
        rng = self.by_step.get(step)
        if rng is None and predecessor is not None:
            rng = predecessor.kept(step)
        if rng is None:
            rng = on_disk(step)
        self.adopt(step, rank, rng)

    def adopt(self, step: int, rank: int, rng: bytes | None) -> None:
        """Sets them to what was found of that step; to a seed where nothing was."""
        if rng is not None:
            self.by_step[step] = rng
            self._random.write(rng)
            return
        if step == 0:  # they are what the function has made of them, as in an unbroken run
            return
        seed_all(rank, step)
        self._note(
            f"rank {rank}: nobody holds its random number generators at step {step}; "
            "they are seeded from rank and step"
        )

    def leave(self, disk: Any, directory: str, rank: int) -> None:
        """Another rank may be asked to persist a step: it needs every rank's generators."""
        for step, rng in self.by_step.items():
            try:
                disk.write_rng(directory, step, rank, rng)
            except OSError as error:
                if not disk.is_superseded(directory, step):
                    self._note(f"rank {rank} cannot write to the checkpoint directory: {error}")
                return
