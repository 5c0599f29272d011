"""Checkpoints on disk: DCP's format, one directory a step, visible only when all of it is durable.

A checkpoint is written under a hidden name, made durable file by file, and published by one rename:
whatever instant a kill comes at, what `step-*` names is whole. Its `manifest.json` holds the size
and checksum of every file, so damage that comes later is noticed and the next older one is used.

Replicas are equal, so rank 0 writes the state; the other ranks only leave their random number
generators in the hidden directory, and rank 0 publishes when all of them are there. What is not a
tensor is stored as a tensor of MessagePack bytes. DCP unpickles its `.metadata`: here it is read by
an unpickler that knows DCP's own classes, and nothing else.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import pickle
import queue
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from resilient.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from resilient.state.encoding import decode, encode
from resilient.state.snapshot import SECTIONS, Image

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
RANKS_TIMEOUT_S = 30.0
"""How long rank 0 waits for the other ranks' files before it gives a checkpoint up."""
STALE_TIMEOUT_S = 1.0
"""The same, once the generation has ended: what is on its way is still worth waiting for."""

_STEP_DIR = re.compile(r"step-(\d{8,})")
_HIDDEN_DIR = re.compile(r"\.(?:pending|removing)-step-(\d{8,})")
_SMALL_KEY = "resilient.small"

# One rank writes alone, on purpose, while torch.distributed is in use beside it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def step_dir(directory: str | os.PathLike[str], step: int) -> Path:
    return Path(directory) / f"step-{step:08d}"


def _pending_dir(directory: str | os.PathLike[str], step: int) -> Path:
    return Path(directory) / f".pending-step-{step:08d}"


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.bin"


# ---------------------------------------------------------------- finding


@dataclass(frozen=True)
class Found:
    """One checkpoint directory. problem: why it cannot be used, "" if it can."""

    step: int
    path: Path
    problem: str = ""


def scan(directory: str | os.PathLike[str], *, thorough: bool = True) -> Iterator[Found]:
    """The checkpoints in directory, newest first, each checked as it is asked for."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    steps = sorted((int(m[1]) for name in names if (m := _STEP_DIR.fullmatch(name))), reverse=True)
    for step in steps:
        path = step_dir(directory, step)
        yield Found(step, path, _problem(path, thorough))


def _problem(path: Path, thorough: bool = True) -> str:
    try:
        check(path, thorough=thorough)
    except CheckpointError as error:
        return str(error)
    return ""


_scanned: dict[str, set[int]] = {}  # directory -> steps found damaged when it was first looked at


def newest_complete(
    directory: str | os.PathLike[str], note: Callable[[str], None] | None = None
) -> int | None:
    """The step of the newest checkpoint that is whole, or None.

    The first time, every byte is read until one is found whole. Later in the life of a process,
    when it is asked in the middle of a recovery, what the living job has added is only measured.

    Args:
        note: is told, in one line each, which newer ones are skipped and why.
    """
    key = os.path.realpath(directory)
    first = key not in _scanned
    damaged = _scanned.setdefault(key, set())
    for found in scan(directory, thorough=first):
        if found.step in damaged:
            continue
        if not found.problem:
            return found.step
        if first:
            damaged.add(found.step)
        if note is not None:
            note(f"checkpoint {found.path.name} is skipped: {found.problem}")
    return None


def check(path: Path, *, thorough: bool = True) -> dict[str, Any]:
    """Whether a checkpoint is whole: its files' sizes and, if thorough, every byte of them.

    Returns:
        its manifest.
    Raises:
        CheckpointCorrupt: it is damaged or incomplete; says what.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = dict(manifest["files"])
        version, step = int(manifest["version"]), int(manifest["step"])
    except OSError as error:
        raise CheckpointCorrupt(f"no {MANIFEST} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{MANIFEST} cannot be read ({error!r})") from None
    if version != FORMAT_VERSION:
        raise CheckpointCorrupt(f"format version {version}, this release reads {FORMAT_VERSION}")
    if path != step_dir(path.parent, step):
        raise CheckpointCorrupt(f"it says that it is of step {step}")
    for name, (size, checksum) in sorted(files.items()):
        if os.path.basename(name) != name:
            raise CheckpointCorrupt(f"it names a file outside its directory: {name!r}")
        try:
            if thorough:
                found = _measure(path / name)
            else:
                found = (os.stat(path / name).st_size, checksum)
        except OSError as error:
            raise CheckpointCorrupt(f"{name}: {error.strerror}") from None
        if found != (size, checksum):
            what = "is cut short" if found[0] < size else "is damaged"
            raise CheckpointCorrupt(f"{name} {what}")
    if ".metadata" not in files:
        raise CheckpointCorrupt(".metadata is missing")
    read_metadata(path)
    return dict(manifest)


def _measure(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


# ---------------------------------------------------------------- reading


_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
}
_CLASSES["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = filesystem._StorageInfo
_CLASSES["torch", "Size"] = torch.Size
_CLASSES["torch.serialization", "_get_layout"] = torch.serialization._get_layout


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, torch.Size and the dtypes: nothing that can act."""

    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is None and module == "torch" and "." not in name:
            value = getattr(torch, name, None)
            known = value if isinstance(value, torch.dtype) else None
        if known is None:
            raise CheckpointCorrupt(f".metadata names {module}.{name}, which is not DCP metadata")
        return known


def read_metadata(path: Path) -> metadata.Metadata:
    """DCP's metadata of a checkpoint, checked.

    Raises:
        CheckpointCorrupt: it cannot be read, or holds anything but tensors of files in `path`.
    """
    try:
        found = _Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
    except CheckpointCorrupt:
        raise
    except Exception as error:  # damaged bytes make pickle raise nearly anything
        raise CheckpointCorrupt(f".metadata cannot be read ({error!r})") from None
    if type(found) is not metadata.Metadata or type(found.state_dict_metadata) is not dict:
        raise CheckpointCorrupt(".metadata is not DCP metadata")
    for entry in found.state_dict_metadata.values():
        # an entry of bytes would be unpickled by DCP when it is loaded
        if type(entry) is not metadata.TensorStorageMetadata:
            raise CheckpointCorrupt(".metadata lists something that is not a tensor")
    if type(found.storage_data) is not dict:
        raise CheckpointCorrupt(".metadata does not say where the tensors are")
    for info in found.storage_data.values():
        if type(info) is not filesystem._StorageInfo:
            raise CheckpointCorrupt(".metadata does not say where the tensors are")
        name = info.relative_path
        if type(name) is not str or os.path.basename(name) != name or info.transform_descriptors:
            raise CheckpointCorrupt(f".metadata points outside its directory: {name!r}")
    if found.storage_meta is None:
        found.storage_meta = metadata.StorageMeta()
    return found


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return read_metadata(Path(self.path))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointCorrupt("the checkpoint holds pickled bytes, which are not read")


def load(directory: str | os.PathLike[str], step: int, rank: int) -> tuple[Image, bytes | None]:
    """Reads a checkpoint whole, in any world size.

    Returns:
        the image, on the CPU; and the random number generators of that rank, None when they are
        not in it (the world was smaller then).
    Raises:
        CheckpointMissing: no checkpoint of that step.
        CheckpointCorrupt: it is damaged.
    """
    path = step_dir(directory, step)
    if not path.is_dir():
        raise CheckpointMissing(f"there is no checkpoint {path}", step=step)
    check(path)
    listed = read_metadata(path).state_dict_metadata
    tensors: dict[str, Any] = {}
    try:
        for key, entry in listed.items():
            assert isinstance(entry, metadata.TensorStorageMetadata)  # read_metadata checked it
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(tensors, storage_reader=_Reader(path), planner=_Planner(), no_dist=True)
        small = tensors.pop(_SMALL_KEY)
    except (Exception, CheckpointException) as error:
        raise CheckpointCorrupt(f"{path} cannot be loaded: {error!r}", step=step) from None
    saved_step, tree, sections = decode(bytes(small.numpy()))
    image = Image(saved_step, tree)
    for key, section in sections.items():
        image.section(section)[key] = tensors[key]
    rng = path / _rng_name(rank)
    return image, rng.read_bytes() if rng.exists() else None


# ---------------------------------------------------------------- writing


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> metadata.StorageMeta:
        # DCP's own would keep the path it is written to, which is not the one it will have, as an
        # object of pathlib's.
        return metadata.StorageMeta(save_id=self.save_id)


def _never() -> bool:
    return False


def write_rng(directory: str | os.PathLike[str], step: int, rank: int, rng: bytes) -> None:
    """Leaves a rank's generators where the rank that writes this step will find them."""
    pending = _pending_dir(directory, step)
    pending.mkdir(parents=True, exist_ok=True)
    target = pending / _rng_name(rank)
    # The rank that publishes makes it durable: this is called in the middle of a recovery.
    target.with_suffix(".tmp").write_bytes(rng)
    os.rename(target.with_suffix(".tmp"), target)


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
        OSError: the storage refuses.
    """
    final, pending = step_dir(directory, image.step), _pending_dir(directory, image.step)
    pending.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(pending):  # what a killed writer left
        if name.endswith(".distcp") or name.startswith(".metadata"):
            os.unlink(pending / name)
    tensors: dict[str, Any] = {}
    sections: dict[str, str] = {}
    for section in SECTIONS:
        for key, tensor in image.section(section).items():
            tensors[key] = tensor
            sections[key] = section
    small = bytearray(encode([image.step, image.tree, sections]))
    tensors[_SMALL_KEY] = torch.frombuffer(small, dtype=torch.uint8)
    writer = _Writer(pending, sync_files=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    missing = _wait_ranks(pending, world_size, ranks_timeout_s, is_stale)
    if missing and needs_all_ranks:
        raise CheckpointMissing(f"its ranks left no {', '.join(sorted(missing))}", step=image.step)
    wanted = sorted({_rng_name(rank) for rank in range(world_size)} - missing)
    for name in wanted:
        _sync(pending / name)
    names = [n for n in os.listdir(pending) if n.endswith(".distcp")] + [".metadata", *wanted]
    manifest = {
        "version": FORMAT_VERSION,
        "step": image.step,
        "world_size": world_size,
        "files": {name: _measure(pending / name) for name in sorted(names)},
    }
    for name in set(os.listdir(pending)) - set(names):
        os.unlink(pending / name)  # files of ranks of a larger, older world
    _write_durably(pending / MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync(pending)
    if final.exists():
        if not _problem(final):
            _remove(pending)  # the same step was reached again: never be without it
            return
        _remove(final)
    os.rename(pending, final)
    _sync(Path(directory))
    _scanned.get(os.path.realpath(directory), set()).discard(image.step)


def _wait_ranks(
    pending: Path, world_size: int, timeout_s: float, is_stale: Callable[[], bool]
) -> set[str]:
    """Waits for every rank's generators; returns the names of those that did not come."""
    deadline_s = time.monotonic() + timeout_s
    wanted = {_rng_name(rank) for rank in range(world_size)}
    while missing := wanted - set(os.listdir(pending)):
        now_s = time.monotonic()
        if is_stale():
            deadline_s = min(deadline_s, now_s + STALE_TIMEOUT_S)
            is_stale = _never  # the bound is set once
        if now_s > deadline_s:
            break
        time.sleep(0.005)
    return missing


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


def _remove(path: Path) -> None:
    """Out of sight first: a kill half-way must not leave half a checkpoint under a step's name."""
    hidden = path.with_name(f".removing-{path.name.removeprefix('.pending-')}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def prune(directory: str | os.PathLike[str], keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and what was left unfinished before them."""
    names = os.listdir(directory)
    steps = sorted(int(m[1]) for name in names if (m := _STEP_DIR.fullmatch(name)))
    for step in steps[:-keep]:
        _remove(step_dir(directory, step))
    for name in names:
        match = _HIDDEN_DIR.fullmatch(name)
        if match and steps and int(match[1]) < steps[-1]:
            shutil.rmtree(Path(directory) / name, ignore_errors=True)


def clear_pending(directory: str | os.PathLike[str]) -> None:
    """Removes every unfinished checkpoint: their writers are gone."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        if _HIDDEN_DIR.fullmatch(name):
            shutil.rmtree(Path(directory) / name, ignore_errors=True)


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
                self._note(f"checkpoint of step {job.step} was not written: {error}")
            del job  # it holds a whole state
            with self._idle:
                self._num_waiting -= 1
                self._idle.notify_all()

    def _write(self, image: Image, world_size: int, entry: int) -> None:
        save(self.directory, image, world_size, is_stale=lambda: self._entry != entry)
        self._published(image.step)
        prune(self.directory, self._keep)

    def finish(self, image: Image, world_size: int) -> None:
        """Writes, publishes and prunes, in this thread, with the generators that are there."""
        save(
            self.directory,
            image,
            world_size,
            ranks_timeout_s=STALE_TIMEOUT_S,
            needs_all_ranks=False,
        )
        self._published(image.step)
        prune(self.directory, self._keep)

    def _close(self) -> None:
        """At the end of the process: what is under way is finished, the thread is a daemon."""
        self.enter()
        self.wait_idle(RANKS_TIMEOUT_S)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits for what is under way; False when it is not done in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_waiting == 0, timeout_s)
