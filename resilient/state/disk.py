"""Writes checkpoints to disk: a new one is visible only when all of it is durable.

A checkpoint is written under a hidden name of its writer's own, made durable file by file, and
published by one rename: whatever instant a kill comes at, what `step-*` names is whole.

Replicas are equal, so rank 0 writes the state. Of the other ranks only their random number
generators are needed: each leaves them in a file of its own beside the checkpoints, never inside
one, and rank 0 copies them in when all are there. So no rank, however late, touches a directory
that another one is about to publish or to remove.

What is written here, and how it is read back, is in `stored`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from resilient.errors import CheckpointError, CheckpointMissing
from resilient.state.encoding import encode
from resilient.state.snapshot import SECTIONS, Image
from resilient.state.stored import (
    FORMAT_VERSION,
    MANIFEST,
    SMALL_KEY,
    STEP_DIR,
    complete_steps,
    is_superseded,
    load,
    mark_replaced,
    measure,
    newest_complete,
    problem_of,
    rng_name,
    step_dir,
)

__all__ = ["is_superseded", "load", "newest_complete"]  # of `stored`, for our callers

RANKS_TIMEOUT_S = 30.0
"""How long rank 0 waits for the other ranks' files before it gives a checkpoint up."""
STALE_TIMEOUT_S = 1.0
"""The same, once the generation has ended: what is on its way is still worth waiting for."""

_HIDDEN = re.compile(r"\.(?:pending|removing|rng)-step-(\d{8,})(?:-.*)?")
_LEFT_RNG = re.compile(r"\.rng-step-(\d{8,})-(\d{5,})")


# ---------------------------------------------------------------- the ranks' generators


def _left_rng(directory: str | os.PathLike[str], step: int, rank: int) -> Path:
    return Path(directory) / f".rng-step-{step:08d}-{rank:05d}"


def write_rng(directory: str | os.PathLike[str], step: int, rank: int, rng: bytes) -> None:
    """Leaves a rank's generators where the rank that writes this step will find them.

    Not made durable: the rank that publishes does that, this is called in the middle of a recovery.
    """
    target = _left_rng(directory, step, rank)
    try:
        if target.read_bytes() == rng:
            return
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
    # Two threads of a process may leave the same step's: each has a name of its own until it is.
    unfinished = target.with_name(f"{target.name}-{os.getpid()}-{threading.get_ident()}")
    unfinished.write_bytes(rng)
    os.replace(unfinished, target)


def forget_rng(directory: str | os.PathLike[str], rank: int, after_step: int) -> None:
    """Removes what this rank, or one before it, left for steps that will be done anew."""
    for name in _listed(directory):
        match = _LEFT_RNG.fullmatch(name)
        if match and int(match[1]) > after_step and int(match[2]) == rank:
            (Path(directory) / name).unlink(missing_ok=True)


def _wait_ranks(
    directory: Path, step: int, world_size: int, timeout_s: float, is_stale: Callable[[], bool]
) -> dict[int, bytes]:
    """Waits for the generators of every rank; returns those that came, by rank."""
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, bytes] = {}
    while True:
        for rank in range(world_size):
            if rank not in found:
                try:
                    found[rank] = _left_rng(directory, step, rank).read_bytes()
                except FileNotFoundError:
                    continue
        now_s = time.monotonic()
        if is_stale():
            deadline_s = min(deadline_s, now_s + STALE_TIMEOUT_S)
            is_stale = _never  # the bound is set once
        if len(found) == world_size or now_s > deadline_s:
            return found
        time.sleep(0.005)


def _never() -> bool:
    return False


# ---------------------------------------------------------------- one checkpoint


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> metadata.StorageMeta:
        # DCP's own would keep the path it is written to, which is not the one it will have, as an
        # object of pathlib's.
        return metadata.StorageMeta(save_id=self.save_id)


def save(
    directory: str | os.PathLike[str],
    image: Image,
    world_size: int,
    *,
    ranks_timeout_s: float = RANKS_TIMEOUT_S,
    is_stale: Callable[[], bool] = _never,
    needs_all_ranks: bool = True,
) -> None:
    """Writes and publishes the checkpoint of image.step, once every rank's `write_rng` is there.

    Args:
        image: on the CPU, and nobody writes to it.
        is_stale: tells when the generation that wrote it has ended, and waiting is in vain.
    Raises:
        CheckpointMissing: a rank's file did not come, and all are needed; nothing is published.
        CheckpointError, OSError: the storage refuses.
    """
    step = image.step
    pending = Path(directory) / f".pending-step-{step:08d}-{secrets.token_hex(4)}"
    pending.mkdir(parents=True)
    try:
        _write_image(pending, image)
        rngs = _wait_ranks(Path(directory), step, world_size, ranks_timeout_s, is_stale)
        missing = sorted(set(range(world_size)) - rngs.keys())
        if missing and needs_all_ranks:
            names = ", ".join(rng_name(rank) for rank in missing)
            raise CheckpointMissing(f"its ranks left no {names}", step=step)
        for rank, rng in sorted(rngs.items()):
            _write_durably(pending / rng_name(rank), rng)
        manifest = {
            "version": FORMAT_VERSION,
            "step": step,
            "world_size": world_size,
            "files": {name: measure(pending / name) for name in sorted(os.listdir(pending))},
        }
        _write_durably(pending / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync(pending)
        _publish(pending, step_dir(directory, step))
    finally:
        shutil.rmtree(pending, ignore_errors=True)  # gone already where it was published
    mark_replaced(directory, step)


def _write_image(pending: Path, image: Image) -> None:
    tensors: dict[str, Any] = {}
    sections: dict[str, str] = {}
    for section in SECTIONS:
        for key, tensor in image.section(section).items():
            tensors[key] = tensor
            sections[key] = section
    small = bytearray(encode([image.step, image.tree, sections]))
    tensors[SMALL_KEY] = torch.frombuffer(small, dtype=torch.uint8)
    try:
        dcp.save(tensors, storage_writer=_Writer(pending, sync_files=True), no_dist=True)
    except CheckpointException as error:  # a BaseException of DCP's: nobody here would catch it
        causes = [cause for cause, _ in error.failures.values()]
        raise CheckpointError(str(causes[0] if causes else error), step=image.step) from None


def _publish(pending: Path, final: Path) -> None:
    """From here on it is there. The one that was there before goes only if it is damaged: when a
    step was reached again, or by another writer at the same time, it is never missing."""
    if final.exists():
        if not problem_of(final):
            return
        _remove(final)
    try:
        os.rename(pending, final)
    except OSError:
        if problem_of(final):
            raise
    _sync(final.parent)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Makes a file's bytes, or a directory's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- removing


def _remove(path: Path) -> None:
    """Out of sight first: a kill half-way must not leave half a checkpoint under a step's name."""
    hidden = path.with_name(f".removing-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        os.rename(path, hidden)
    except FileNotFoundError:
        return  # by another writer, just now
    shutil.rmtree(hidden, ignore_errors=True)


def prune(directory: str | os.PathLike[str], keep: int) -> None:
    """Removes what is older than the newest `keep` complete checkpoints, and what was left
    unfinished before the newest. Damaged ones that are newer stay until their step comes again."""
    kept = list(itertools.islice(complete_steps(directory), keep))
    for name in _listed(directory) if kept else ():
        match = STEP_DIR.fullmatch(name)
        if match and int(match[1]) < kept[-1]:
            _remove(Path(directory) / name)
    if kept:
        _clear(directory, kept[0])


def clear_pending(directory: str | os.PathLike[str]) -> None:
    """Removes every unfinished checkpoint: their writers are gone."""
    _clear(directory, None)


def _clear(directory: str | os.PathLike[str], last_step: int | None) -> None:
    for name in _listed(directory):
        match = _HIDDEN.fullmatch(name)
        if match is None or (last_step is not None and int(match[1]) > last_step):
            continue
        path = Path(directory) / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _listed(directory: str | os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


# ---------------------------------------------------------------- in the background


@dataclass
class _Job:
    step: int
    rank: int
    world_size: int
    rng: bytes
    image: Image | None
    entry: int


class Checkpoints:
    """The checkpoints of one job, written every so many steps by a thread of this process.

    The caller skips a step on rank 0 while the last one is still being written (`is_busy`); the
    other ranks' files are small and wait in line.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        note: Callable[[str], None] | None = None,
        published: Callable[[int], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._note = note or (lambda line: None)
        self._published = published or (lambda step: None)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_waiting = 0
        self._thread: threading.Thread | None = None
        self._entry = 0
        self._has_published = False
        atexit.register(self._close)

    def is_busy(self) -> bool:
        return self._num_waiting > 0

    def enter(self) -> None:
        """A new generation: what waits for files of ranks of the old one need not wait longer."""
        self._entry += 1

    def start(self, step: int, rank: int, world_size: int, rng: bytes, image: Image | None) -> None:
        """Begins to write in the background; image: of rank 0, on the CPU, nobody's but ours."""
        with self._idle:
            self._num_waiting += 1
        self._jobs.put(_Job(step, rank, world_size, rng, image, self._entry))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="resilient-checkpoint", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                write_rng(self.directory, job.step, job.rank, job.rng)
                if job.image is not None:
                    self._write(job.image, job.world_size, job.entry)
            except Exception as error:
                # The training goes on: the checkpoint before this one is still there.
                if not is_superseded(self.directory, job.step):
                    self._note(f"checkpoint of step {job.step} was not written: {error}")
            del job  # it holds a whole state
            with self._idle:
                self._num_waiting -= 1
                self._idle.notify_all()

    def _write(self, image: Image, world_size: int, entry: int) -> None:
        save(self.directory, image, world_size, is_stale=lambda: self._entry != entry)
        self._published(image.step)
        prune(self.directory, self._keep)
        self._has_published = True

    def finish(self, image: Image, world_size: int) -> None:
        """Writes, publishes and prunes, in this thread, with the generators that are there."""
        try:
            save(
                self.directory,
                image,
                world_size,
                ranks_timeout_s=STALE_TIMEOUT_S,
                needs_all_ranks=False,
            )
        except (OSError, CheckpointError):
            if not is_superseded(self.directory, image.step):
                raise
        self._published(image.step)
        prune(self.directory, self._keep)

    def _close(self) -> None:
        """At the end of the process: what is under way is finished, the thread is a daemon."""
        self.enter()
        self.wait_idle(RANKS_TIMEOUT_S)
        if self._has_published:
            with contextlib.suppress(OSError):
                prune(self.directory, self._keep)  # what the other ranks left since

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits for what is under way; False when it is not done in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_waiting == 0, timeout_s)
