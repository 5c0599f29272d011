"""Moves an image from the ranks that hold it to those that do not, in large chunks.

The holder first sends a manifest (the small state, and name, type and shape of every tensor); both
sides cut the bytes that follow into the same *pieces* from it: small tensors together, large ones
in slices of 64 MiB straight out of and into their own memory. Two pieces are in flight at a time,
so the extra memory is bounded. A receiver listens to one holder, and a holder only sends: there is
no cycle to deadlock in, and an abort frees either side as it frees any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from resilient.core.model import Cut, CutKind
from resilient.errors import CheckpointCorrupt
from resilient.state.encoding import decode, encode
from resilient.state.snapshot import SECTIONS, Image

CHUNK_BYTES = 64 << 20
SMALL_BYTES = 1 << 20  # tensors below this travel together

Memory = Callable[[str, str, torch.dtype, Sequence[int], str], Tensor]
"""(section, key, dtype, shape, device type) -> the tensor to receive into."""


def receivers_of(cut: Cut, rank: int, world_size: int) -> list[int]:
    """Whom this rank sends to: receiver i (ascending) listens to holders[i % len(holders)]."""
    if cut.kind is not CutKind.MEMORY or rank not in cut.holders:
        return []
    receivers = [other for other in range(world_size) if other not in cut.holders]
    mine, step = cut.holders.index(rank), len(cut.holders)
    return receivers[mine::step]


# ---------------------------------------------------------------- what goes over the wire


@dataclass(frozen=True)
class _Slice:
    """Bytes of one tensor: its index in the manifest, where they begin, how many."""

    index: int
    start: int
    num_bytes: int


def _pieces(sizes_bytes: Sequence[int]) -> Iterator[list[_Slice]]:
    """Cuts tensors of these sizes into messages; both sides call it with the same sizes."""
    together: list[_Slice] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        if size >= SMALL_BYTES:
            for start in range(0, size, CHUNK_BYTES):
                yield [_Slice(index, start, min(CHUNK_BYTES, size - start))]
        elif size:
            if filled + size > CHUNK_BYTES:
                yield together
                together, filled = [], 0
            together.append(_Slice(index, 0, size))
            filled += size
    if together:
        yield together


def _is_plain(tensor: Tensor) -> bool:
    lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor (0-dim and bool too)."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _manifest(image: Image, tensors: list[tuple[str, str, Tensor]]) -> bytes:
    entries = [
        [section, key, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type]
        for section, key, t in tensors
    ]
    return encode([image.step, image.tree, entries])


class _Wire:
    """Point-to-point messages of bytes in the group, staged on a device it can carry."""

    def __init__(self, group: Any) -> None:
        self._group = group
        config = str(dist.get_backend_config(group))
        self._device = torch.device("cpu")
        if "cpu" not in config or "cpu:nccl" in config:
            self._device = torch.device(torch.accelerator.current_accelerator() or "cpu")

    def send(self, data: Tensor, rank: int) -> Any:
        return dist.isend(data.to(self._device), group=self._group, group_dst=rank)

    def receive(self, data: Tensor, rank: int) -> None:
        if self._device.type == "cpu":
            dist.recv(data, group=self._group, group_src=rank)
        else:
            staged = torch.empty_like(data, device=self._device)
            dist.recv(staged, group=self._group, group_src=rank)
            data.copy_(staged)


# ---------------------------------------------------------------- the two sides


def send(image: Image, ranks: Sequence[int], group: Any, progress: Callable[[], None]) -> None:
    """Sends the image to each of the ranks (of the group).

    Tensors are read while they are sent: nobody may write to them meanwhile.
    """
    if not ranks:
        return
    wire = _Wire(group)
    tensors = [
        (section, key, t) for section in SECTIONS for key, t in image.section(section).items()
    ]
    manifest = torch.frombuffer(bytearray(_manifest(image, tensors)), dtype=torch.uint8)
    length = torch.tensor([manifest.numel()], dtype=torch.int64)
    in_flight = [[wire.send(part, rank) for rank in ranks] for part in (length, manifest)]
    staged: dict[int, Tensor] = {}  # a large tensor that is not plain, while its slices go out
    for piece in _pieces([t.nbytes for _, _, t in tensors]):
        if len(piece) == 1:
            (part,) = piece
            data = _source(tensors[part.index][2], part, staged)
        else:
            data = torch.cat([_source(tensors[part.index][2], part, staged) for part in piece])
        in_flight.append([wire.send(data, rank) for rank in ranks])
        while len(in_flight) > 2:
            _wait(in_flight.pop(0))
            progress()
    for works in in_flight:
        _wait(works)
    progress()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _source(tensor: Tensor, part: _Slice, staged: dict[int, Tensor]) -> Tensor:
    if _is_plain(tensor):
        data = _as_bytes(tensor)
    else:
        if part.start == 0:
            whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            staged[part.index] = _as_bytes(whole)
        data = staged[part.index]
        if part.start + part.num_bytes == tensor.nbytes:
            del staged[part.index]
    return data[part.start : part.start + part.num_bytes]


def receive(rank: int, memory: Memory, group: Any, progress: Callable[[], None]) -> Image:
    """Receives an image from that rank (of the group).

    Args:
        memory: asked for the place of every tensor, before any is overwritten; what it raises is
            raised here.
    """
    wire = _Wire(group)
    length = torch.zeros(1, dtype=torch.int64)
    wire.receive(length, rank)
    manifest = torch.empty(int(length), dtype=torch.uint8)
    wire.receive(manifest, rank)
    step, tree, entries = decode(bytes(manifest.numpy()))
    image = Image(step, tree)
    targets: list[Tensor] = []
    for section, key, dtype_name, shape, kind in entries:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointCorrupt(f"{key} is announced as {dtype_name!r}, which is no dtype")
        target = memory(section, key, dtype, shape, kind)
        targets.append(target)
        image.section(section)[key] = target
    staged: dict[int, Tensor] = {}
    for piece in _pieces([t.nbytes for t in targets]):
        if len(piece) == 1 and _is_plain(targets[piece[0].index]):
            (part,) = piece
            view = _as_bytes(targets[part.index])
            wire.receive(view[part.start : part.start + part.num_bytes], rank)
        else:
            data = torch.empty(sum(part.num_bytes for part in piece), dtype=torch.uint8)
            wire.receive(data, rank)
            _spread(data, piece, targets, staged)
        progress()
    return image


def _spread(
    data: Tensor, piece: list[_Slice], targets: list[Tensor], staged: dict[int, Tensor]
) -> None:
    offset = 0
    for part in piece:
        target = targets[part.index]
        received = data[offset : offset + part.num_bytes]
        offset += part.num_bytes
        if part.start == 0:
            staged[part.index] = torch.empty(target.nbytes, dtype=torch.uint8)
        whole = staged[part.index]
        whole[part.start : part.start + part.num_bytes] = received
        if part.start + part.num_bytes == target.nbytes:
            with torch.no_grad():
                target.copy_(whole.view(target.dtype).view(target.shape))
            del staged[part.index]
