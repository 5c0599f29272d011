"""What a worker process keeps from one generation to the next, and what one entry is told.

A generation's own things (groups, exchanges, the Job) are made anew at each entry; all that must
outlive them is here, in one place, so that what survives can be read off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from resilient import wire
from resilient.core.model import Cut
from resilient.page import Page
from resilient.state.protect import Protected
from resilient.state.rng import RandomState
from resilient.worker.build import BuildCache
from resilient.worker.drill import Drills
from resilient.worker.loader import LoaderCache


class Link(Protocol):
    """The agent, as the training thread sees it."""

    page: Page

    def send(self, message: wire.Message) -> None: ...
    def is_aborted(self, generation: int) -> bool: ...
    def wait_abort(self, generation: int, timeout_s: float) -> bool: ...


class NoAgent:
    """Stands in where nobody launched us: nothing is told to anybody, nothing is ever aborted."""

    def __init__(self) -> None:
        self.page = Page.create("alone")

    def send(self, message: wire.Message) -> None:
        pass

    def is_aborted(self, generation: int) -> bool:
        return False

    def wait_abort(self, generation: int, timeout_s: float) -> bool:
        return False


@dataclass(frozen=True)
class Checkpoints:
    """Where the state is persisted to, and every how many steps (0: only when told to)."""

    directory: str
    every: int


@dataclass(frozen=True)
class Entry:
    """One entry of the train function.

    Attributes:
        predecessor: page of the process that held this rank before; the rank's own RNG is in it.
    """

    generation: int
    rank: int
    local_rank: int
    world_size: int
    cut: Cut
    predecessor: Page | None = None


@dataclass
class Lifetime:
    """One a process.

    Attributes:
        step: committed steps of the state that is held.
        first_world_size: of the job's first generation; parts keep the size that it gave them.
        first_random_state: generators as they were before the very first entry.
    """

    link: Link
    protected: Protected
    drills: Drills
    checkpoints: Checkpoints | None = None
    device: torch.device | None = None
    step: int = 0
    first_world_size: int = 1
    first_random_state: bytes | None = None
    loaders: LoaderCache = field(default_factory=LoaderCache)
    random_state: RandomState = field(default_factory=RandomState)
    builds: BuildCache = field(default_factory=BuildCache)

    @property
    def page(self) -> Page:
        return self.link.page
