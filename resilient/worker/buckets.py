"""The flat memory that gradients and buffers travel in.

The one idea: which parameter lies where follows from the module alone, never from what a backward
happened to do first, so the sums are taken in the same order in every generation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from resilient.state.snapshot import AlternatingCopies

FIRST_BUCKET_BYTES = 1 << 20  # small: the exchange starts early in the backward
BUCKET_BYTES = 25 << 20

_storage_uses = torch._C._storage_Use_Count


class Bucket:
    """Some parameters of one dtype and device, and the flat tensor their gradients travel in.

    Attributes:
        indices: of its parameters, in the exchange's own order.
        num_flags: of the last bucket only: one element a parameter of the module, behind the
            gradients, says whether this rank has a gradient for it.
    """

    __slots__ = (
        "data",
        "flags",
        "flat",
        "free_refs",
        "free_uses",
        "indices",
        "num_flags",
        "params",
        "pending",
        "views",
        "work",
    )

    def __init__(self, indices: list[int], params: list[nn.Parameter]) -> None:
        self.indices = indices
        self.params = params
        self.pending = len(params)
        self.num_flags = 0
        self.work: Any = None
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []

    def allocate(self) -> None:
        sizes = [param.numel() for param in self.params]
        like = self.params[0]
        self.flat = torch.empty(sum(sizes) + self.num_flags, dtype=like.dtype, device=like.device)
        self.data = self.flat[: sum(sizes)]
        self.flags = self.flat[sum(sizes) :]
        self.views = []
        offset = 0
        for param, size in zip(self.params, sizes, strict=True):
            # A gradient strided as its parameter keeps the optimizer on its fast path.
            strides = param.stride() if _is_dense(param) else _contiguous_strides(param.shape)
            self.views.append(self.flat.as_strided(param.shape, strides, offset))
            offset += size
        self.free_refs = self._num_refs(range(len(sizes)))
        self.free_uses = _storage_uses(self.flat.untyped_storage()._cdata)

    def _num_refs(self, which: Iterable[int]) -> int:
        return max([sys.getrefcount(self.views[i]) for i in which])

    def is_held_elsewhere(self, which: Iterable[int]) -> bool:
        """Whether somebody kept one of these gradients, or anything that shares their memory.

        Args:
            which: views that are no parameter's gradient any more.
        """
        assert self.flat is not None
        if _storage_uses(self.flat.untyped_storage()._cdata) > self.free_uses:
            return True
        return self._num_refs(which) > self.free_refs


def assign(params: Sequence[nn.Parameter]) -> list[Bucket]:
    """Buckets of one dtype and device each, in the order in which they are launched.

    Gradients arrive roughly from the last parameter to the first; params are in that order.
    """
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, param in enumerate(params):
        key = (param.dtype, param.device)
        bucket = filling.setdefault(key, [])
        bucket.append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + param.numel() * param.element_size()
        if filled_bytes[key] >= (BUCKET_BYTES if done else FIRST_BUCKET_BYTES):
            done.append(filling.pop(key))
            filled_bytes[key] = 0
    done.extend(filling.values())
    return [Bucket(indices, [params[i] for i in indices]) for indices in done]


def _is_dense(param: torch.Tensor) -> bool:
    return param.is_contiguous() or (
        (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
        or (param.dim() == 5 and param.is_contiguous(memory_format=torch.channels_last_3d))
    )


def _contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Buffers:
    """The module's buffers (BatchNorm's statistics, say): every rank gets rank 0's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._works: list[Any] = []
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        if hasattr(self._options, "asyncOp"):
            self._options.asyncOp = True
        self._find()

    def _find(self) -> None:
        self._places = [
            (owner._buffers, name, buffer)
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        buffers = [_writable(buffer) for buffer in self._module.buffers() if buffer.numel()]
        self.layout = [(tuple(b.shape), str(b.dtype)) for b in buffers]
        self._flats: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            mine = [buffer for buffer in buffers if buffer.device == device]
            starts, end = [], 0
            for buffer in mine:
                starts.append(end)
                end += -(-buffer.numel() * buffer.element_size() // 16) * 16  # keep them aligned
            flat = torch.zeros(end, dtype=torch.uint8, device=device)
            views = [
                flat[start : start + buffer.numel() * buffer.element_size()]
                .view(buffer.dtype)
                .view(buffer.shape)
                for start, buffer in zip(starts, mine, strict=True)
            ]
            self._flats.append((flat, views, mine))

    def launch(self, group: Any) -> None:
        # A forward may put another tensor in a buffer's place; the old one is nobody's then.
        if any(held.get(name) is not buffer for held, name, buffer in self._places):
            self._find()
        self._is_root = self._flats and group.rank() == 0
        self._works = []
        for flat, views, buffers in self._flats:
            if self._is_root:
                torch._foreach_copy_(views, buffers)
            self._works.append(group.broadcast([flat], self._options))

    def wait(self) -> None:
        for work, (_, views, buffers) in zip(self._works, self._flats, strict=True):
            work.wait()
            if not self._is_root:
                # What is equal is left alone: a large one (a causal mask) would count as changed.
                changed = [
                    (buffer, view)
                    for buffer, view in zip(buffers, views, strict=True)
                    if buffer.nbytes <= AlternatingCopies.SMALL_BYTES
                    or not torch.equal(buffer, view)
                ]
                with torch.no_grad():
                    torch._foreach_copy_([b for b, _ in changed], [v for _, v in changed])
        self._works = []


def _writable(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer's memory, to be written after a backward.

    A small one as .data: the write must not count as a change of a tensor that a second backward of
    the same forward saved (BatchNorm saves its buffers); small ones are copied at each commit. A
    large one is copied when its version says that it changed: there the write has to count.
    """
    is_small = buffer.nbytes <= AlternatingCopies.SMALL_BYTES
    return buffer.data if is_small else buffer.detach()
