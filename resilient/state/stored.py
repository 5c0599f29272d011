"""Finds and reads checkpoints on disk, as if a stranger had written them.

A checkpoint is one directory `step-*` in DCP's format, and a `manifest.json` with the size and
checksum of every file in it: damage is noticed, and the next older one is used. DCP unpickles its
`.metadata`, and a pickle can run anything: here it is read by an unpickler that knows DCP's own
classes, and nothing else. What is not a tensor was stored as a tensor of MessagePack bytes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
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
from resilient.state.encoding import decode
from resilient.state.snapshot import Image

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
STEP_DIR = re.compile(r"step-(\d{8,})")
SMALL_KEY = "resilient.small"

# One rank reads or writes alone, on purpose, while torch.distributed is in use beside it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def step_dir(directory: str | os.PathLike[str], step: int) -> Path:
    return Path(directory) / f"step-{step:08d}"


def rng_name(rank: int) -> str:
    """Of the file with a rank's random number generators."""
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
    steps = sorted((int(m[1]) for name in names if (m := STEP_DIR.fullmatch(name))), reverse=True)
    for step in steps:
        path = step_dir(directory, step)
        yield Found(step, path, problem_of(path, thorough))


def problem_of(path: Path, thorough: bool = True) -> str:
    """Why a checkpoint cannot be used, "" if it can."""
    try:
        check(path, thorough=thorough)
    except CheckpointError as error:
        return str(error)
    return ""


_damaged: dict[str, set[int]] = {}  # directory -> steps found damaged when it was first looked at


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
    first = key not in _damaged
    damaged = _damaged.setdefault(key, set())
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


def complete_steps(directory: str | os.PathLike[str]) -> Iterator[int]:
    """The steps of the checkpoints that are not known to be damaged, newest first."""
    damaged = _damaged.get(os.path.realpath(directory), set())
    for found in scan(directory, thorough=False):
        if not found.problem and found.step not in damaged:
            yield found.step


def is_superseded(directory: str | os.PathLike[str], step: int) -> bool:
    """Whether nobody needs the checkpoint of that step any more: it, or a newer one, is whole."""
    return next(complete_steps(directory), -1) >= step


def mark_replaced(directory: str | os.PathLike[str], step: int) -> None:
    """The checkpoint of that step, damaged or not, has made way for a new one."""
    _damaged.get(os.path.realpath(directory), set()).discard(step)


def check(path: Path, *, thorough: bool = True) -> dict[str, Any]:
    """Whether a checkpoint is whole: its files' sizes and, if thorough, every byte of them.

    Returns:
        its manifest.
    Raises:
        CheckpointCorrupt: it is damaged or incomplete; says what.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = {name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()}
        version, step = int(manifest["version"]), int(manifest["step"])
    except OSError as error:
        raise CheckpointCorrupt(f"no {MANIFEST} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
                found = measure(path / name)
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


def measure(path: Path) -> tuple[int, int]:
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
        small = tensors.pop(SMALL_KEY)
    except (Exception, CheckpointException) as error:
        raise CheckpointCorrupt(f"{path} cannot be loaded: {error!r}", step=step) from None
    try:
        saved_step, tree, sections = decode(bytes(small.numpy()))
        image = Image(saved_step, tree)
        for key, section in sections.items():
            image.section(section)[key] = tensors[key]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}", step=step) from None
    if saved_step != step:
        raise CheckpointCorrupt(f"{path} holds step {saved_step}", step=step)
    return image, rng_of(directory, step, rank)


def rng_of(directory: str | os.PathLike[str], step: int, rank: int) -> bytes | None:
    """The random number generators of that rank in a checkpoint, None when they are not in it."""
    path = step_dir(directory, step) / rng_name(rank)
    return path.read_bytes() if path.exists() else None
