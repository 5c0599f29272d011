"""Carries out fire drills: the process strikes itself where `--inject` says.

The agent leaves out of Start what is over; within one process the count is kept here. Each strike
is marked in the page first: the report is to know when the fault began, the agent that it did.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import NoReturn

from resilient.core import drills
from resilient.page import Page

_SLOW_S = 0.2


class DrillError(Exception):
    """What a `raise` drill raises out of the train function."""


class Drills:
    """The drills that this process may still meet; lives as long as the process."""

    def __init__(self, page: Page | None) -> None:
        self._page = page
        self._armed: list[tuple[int, drills.Drill]] = []
        self._num_struck: dict[int, int] = {}
        self._rank = self._generation = 0
        self.points: frozenset[str] = frozenset()

    def arm(self, specs: tuple[str, ...], *, rank: int, generation: int) -> None:
        """Takes the list of a Start; the index of a text is its bit in the page, "" is one over."""
        self._rank, self._generation = rank, generation
        self._armed = [(index, drills.parse(spec)) for index, spec in enumerate(specs) if spec]
        self.points = frozenset(drill.at for _, drill in self._armed)

    def reached(self, point: str, step: int) -> None:
        """Strikes if a drill waits for this point.

        Raises:
            DrillError: for a `raise` drill.
        """
        if point not in self.points:
            return
        for index, drill in self._armed:
            if not drill.matches(point, rank=self._rank, step=step, generation=self._generation):
                continue
            if self._num_struck.get(index, 0) >= drill.times:
                continue
            self._num_struck[index] = self._num_struck.get(index, 0) + 1
            if self._page is not None:
                self._page.mark_fault(index)
            _strike(drill, step)


def _strike(drill: drills.Drill, step: int) -> None:
    if drill.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif drill.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif drill.kind == "exit":
        os._exit(drill.code)
    elif drill.kind == "segv":
        ctypes.string_at(0)
    elif drill.kind == "raise":
        raise DrillError(f"fire drill at step {step}")
    elif drill.kind == "slow":
        time.sleep(_SLOW_S if drill.seconds is None else drill.seconds)
    elif drill.kind == "hang-in-python":
        _spin(drill.seconds)
    else:
        _hold_gil(drill.seconds)


def _spin(seconds: float | None) -> None:
    deadline_s = None if seconds is None else time.monotonic() + seconds
    while deadline_s is None or time.monotonic() < deadline_s:
        pass


def _hold_gil(seconds: float | None) -> None:
    """Sleeps inside a foreign call that, unlike ctypes.CDLL's, does not give the GIL away."""
    libc = ctypes.PyDLL(None)
    if seconds is None:
        _hold_gil_for_ever(libc)
    libc.usleep(int(1e6 * seconds))


def _hold_gil_for_ever(libc: ctypes.PyDLL) -> NoReturn:
    while True:
        libc.sleep(1_000_000)  # a signal ends it early
