"""The shared-memory page between one worker and its agent.

The training thread writes it, the agent reads it, nobody sends anything: a healthy step costs a few
stores, and a worker that holds the GIL for ever, or is stopped, is seen all the same. The page is a
memfd that the agent holds, so what a dead worker wrote survives it.

Two parts. The *progress* words (step, activity, monotonic time) are single aligned 64-bit stores;
a reader may see one word newer than another, which harms nothing. The *small state* of a step (the
random number generators) is a *record* and an *area*. Records are written in rotation: sequence
number, step, and which bytes of which area, with their checksum. The bytes go to an area that none
of the other records names; a state that did not change since the last record is not written again,
its new record names the same area. So a kill in the middle of a write loses only that write, and
the last two steps are always there (each is written at most twice: before the gradients leave, and
at the commit).
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from dataclasses import dataclass
from enum import IntEnum

HEADER_BYTES = 4096
NUM_AREAS = 4
AREA_BYTES = 16 << 20  # virtual: memory is only used where something was written
NUM_RECORDS = 4  # as many as areas: one is always free to be written
MAX_SMALL_BYTES = AREA_BYTES
PAGE_BYTES = HEADER_BYTES + NUM_AREAS * AREA_BYTES
_NAME_OFFSET, _NAME_BYTES = 1024, 128

# indexes of the progress words
_GENERATION, _STEP, _ACTIVITY, _PROGRESS_NS, _SECTION_NS, _TICKS, _PERSISTED, _FAULT_NS = range(8)
_DRILLS, _SEQUENCE, _COMMIT_NS = range(8, 11)

# index of the first record; each is five words: sequence, step, area, length, checksum
_RECORDS, _RECORD_WORDS = 256, 5


class Activity(IntEnum):
    """What the training thread says it is doing."""

    STARTING = 0  # the script runs towards the decorator (an unmodified script stays here)
    WAITING = 1  # at the decorator, without a generation
    JOINING = 2  # making the groups
    BUILDING = 3  # in the train function, before protect()
    RESTORING = 4
    TRAINING = 5
    SECTION = 6
    FINISHED = 7
    PERSISTING = 8


@dataclass(frozen=True)
class Reading:
    """The progress words at one moment.

    Attributes:
        generation: -1 before the first.
        step: committed steps.
        progress_ns: time.monotonic_ns() of the last sign of progress (comparable between
            processes of one machine).
        section: name of the section being run, "" outside one.
        section_timeout_ns: its own hang timeout, 0 for the usual one.
        ticks: optimizer steps of an unmodified script.
        persisted_step: newest step complete on disk that this worker knows of, or None.
        fault_ns: when a drill struck, 0 if none did.
        drills_fired: bit i: drill i of this job has happened in this worker.
        commit_ns: time of the newest commit, 0 before the first.
    """

    generation: int
    step: int
    activity: Activity
    progress_ns: int
    section: str
    section_timeout_ns: int
    ticks: int
    persisted_step: int | None
    fault_ns: int
    drills_fired: int
    commit_ns: int


class Page:
    """One page. The agent creates it, the worker maps the same memory by file descriptor."""

    def __init__(self, fd: int) -> None:
        """Maps the memory behind fd, and owns fd from now on."""
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        # The newest bytes that this process kept: the object, and area, length, checksum.
        self._kept: tuple[bytes | None, int, int, int] = (None, 0, 0, 0)
        self._named = [-1] * NUM_RECORDS  # the area that each record of this process names

    @classmethod
    def create(cls, name: str = "worker") -> Page:
        fd = os.memfd_create(f"resilient-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        page._words[_GENERATION] = -1
        page._words[_PERSISTED] = -1
        page._words[_PROGRESS_NS] = time.monotonic_ns()
        return page

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)

    # ------------------------------------------------------------ writer (the worker)

    def enter(self, generation: int) -> None:
        self._words[_GENERATION] = generation

    def act(self, activity: Activity) -> None:
        """Says what is done now; this is a sign of progress."""
        self._words[_ACTIVITY] = activity
        self._words[_PROGRESS_NS] = time.monotonic_ns()

    def progress(self) -> None:
        self._words[_PROGRESS_NS] = time.monotonic_ns()

    def commit(self, step: int) -> None:
        """step: number of committed steps now."""
        now = time.monotonic_ns()
        self._words[_STEP] = step
        self._words[_COMMIT_NS] = now
        self._words[_PROGRESS_NS] = now

    def set_step(self, step: int) -> None:
        """After a restore: the step is known, nothing was committed."""
        self._words[_STEP] = step

    def tick(self) -> None:
        """One optimizer step of an unmodified script."""
        self._words[_TICKS] += 1
        self._words[_PROGRESS_NS] = time.monotonic_ns()

    def enter_section(self, name: str, timeout_ns: int) -> None:
        data = name.encode()[: _NAME_BYTES - 1]
        self._map[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES] = data.ljust(_NAME_BYTES, b"\0")
        self._words[_SECTION_NS] = timeout_ns
        self.act(Activity.SECTION)

    def leave_section(self, activity: Activity) -> None:
        self._map[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES] = bytes(_NAME_BYTES)
        self._words[_SECTION_NS] = 0
        self.act(activity)

    def set_persisted(self, step: int) -> None:
        self._words[_PERSISTED] = step

    def mark_fault(self, drill: int) -> None:
        """A drill is about to strike: when, and which."""
        self._words[_DRILLS] |= 1 << drill
        self._words[_FAULT_NS] = time.monotonic_ns()

    def keep(self, step: int, data: bytes) -> bool:
        """Keeps the small state of a step.

        The very object that was given the last time costs a few stores, whatever its size.

        Returns:
            False when data is larger than MAX_SMALL_BYTES: then a twin must give it.
        """
        words = self._words
        sequence = words[_SEQUENCE] + 1
        number = sequence % NUM_RECORDS
        record = _RECORDS + _RECORD_WORDS * number
        if data is not self._kept[0] and len(data) > MAX_SMALL_BYTES:
            return False
        words[record] = 0  # invalid while it is written
        self._named[number] = -1
        if data is not self._kept[0]:
            self._kept = (data, *self._fill(data))
        words[record + 1] = step
        _, area, words[record + 3], words[record + 4] = self._kept
        words[record + 2] = self._named[number] = area
        words[record] = sequence
        words[_SEQUENCE] = sequence
        return True

    def _fill(self, data: bytes) -> tuple[int, int, int]:
        """Writes the bytes into an area that no valid record names; returns what names them."""
        area = 0
        while area in self._named:
            area += 1
        start = HEADER_BYTES + area * AREA_BYTES
        self._map[start : start + len(data)] = data
        return area, len(data), zlib.crc32(data)

    # ------------------------------------------------------------ reader (agent, or a successor)

    def read(self) -> Reading:
        words = self._words
        section = ""
        if words[_ACTIVITY] == Activity.SECTION:
            raw = bytes(self._map[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES])
            section = raw.split(b"\0", 1)[0].decode(errors="replace")
        activity = words[_ACTIVITY]
        persisted = words[_PERSISTED]
        return Reading(
            generation=words[_GENERATION],
            step=words[_STEP],
            activity=Activity(activity) if 0 <= activity <= 8 else Activity.STARTING,
            progress_ns=words[_PROGRESS_NS],
            section=section,
            section_timeout_ns=words[_SECTION_NS],
            ticks=words[_TICKS],
            persisted_step=None if persisted < 0 else persisted,
            fault_ns=words[_FAULT_NS],
            drills_fired=words[_DRILLS],
            commit_ns=words[_COMMIT_NS],
        )

    def kept(self, step: int) -> bytes | None:
        """The newest intact small state of that step, or None."""
        newest, found = 0, None
        for index in range(NUM_RECORDS):
            first = _RECORDS + _RECORD_WORDS * index
            sequence, its_step, area, length, checksum = self._words[first : first + _RECORD_WORDS]
            if sequence <= newest or its_step != step or not 0 <= length <= MAX_SMALL_BYTES:
                continue
            if not 0 <= area < NUM_AREAS:
                continue
            start = HEADER_BYTES + area * AREA_BYTES
            data = bytes(self._map[start : start + length])
            if zlib.crc32(data) == checksum:
                newest, found = sequence, data
        return found
