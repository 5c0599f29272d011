"""Copies of a state, and what a state is made of.

An `Image` is one committed step, whole: its *big* tensors (parameters and optimizer state, by
reference) and its *small* part (buffers, schedulers, scalers, cursors: copied). Because the big
part is by reference, an image costs nothing to take; it is true as long as nobody wrote to the
tensors, which their version counters prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from resilient.errors import CheckpointCorrupt
from resilient.state.encoding import Node

SECTIONS = ("parameters", "buffers", "states", "others")

Tensors = dict[str, Tensor]

_version_of: Callable[[Tensor], int] = attrgetter("_version")


@dataclass
class Image:
    """The state at one committed step.

    Attributes:
        step: committed steps.
        tree: by protected name, what is not a module's or optimizer's tensor, packed.
        parameters, states: big tensors, by reference ("model.fc.weight", "optimizer.state.0.step").
        buffers: of modules. others: tensors in the state_dict of anything else. Both are copies.
    """

    step: int
    tree: dict[str, Node] = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)

    def section(self, name: str) -> Tensors:
        if name not in SECTIONS:
            raise CheckpointCorrupt(f"the state has an unknown section {name!r}")
        tensors: Tensors = getattr(self, name)
        return tensors

    def on_cpu(self) -> Image:
        """A copy that nothing which trains on can change."""
        copies = {name: clone_all(self.section(name), "cpu") for name in SECTIONS}
        return Image(self.step, self.tree, **copies)


def clone_all(tensors: Tensors, device: str | None = None) -> Tensors:
    """Copies with the same strides where dense; a tensor held under two keys is copied once."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copy = tensor.detach().to(device or tensor.device, copy=True)
            copies[id(tensor)] = copy
    return {key: copies[id(tensor)] for key, tensor in tensors.items()}


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Autograd's counters of in-place writes. Fused optimizers do not move them: hooks say that."""
    return list(map(_version_of, tensors))


class Copies:
    """Memory for a copy of a list of tensors, reused while their shapes stay the same."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._layout: list[tuple[object, ...]] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies them; the result is valid until the next take."""
        layout: list[tuple[object, ...]] = [
            (t.shape, t.dtype, t.device, t.stride()) for t in tensors
        ]
        with torch.no_grad():
            if layout == self._layout:
                if tensors:
                    torch._foreach_copy_(self._copies, [t.detach() for t in tensors])
            else:
                self._copies = []  # the old memory goes first
                self._copies = [t.detach().clone() for t in tensors]
                self._layout = layout
        return self._copies


class AlternatingCopies:
    """Copies of the buffers at the last two commits: memory for even steps, and for odd ones.

    So a step that is recorded again (at an entry) is written over itself, never over the other one.
    A large buffer that nobody writes (a causal mask) is not copied again: its copy is shared by
    both. That rests on the version counter, which the batch norm kernels do not move: `always`
    says which are copied whatever the counter says.
    """

    SMALL_BYTES = 1 << 16

    def __init__(self) -> None:
        self._banks = (Copies(), Copies())
        self._static: dict[str, tuple[Tensor, int, Tensor]] = {}  # tensor, its version, the copy

    def take(self, step: int, tensors: Tensors, always: set[str]) -> Tensors:
        moving: list[str] = []
        copies: Tensors = {}
        for key, tensor in tensors.items():
            if key in always or tensor.nbytes <= self.SMALL_BYTES:
                moving.append(key)
                continue
            seen, version, copy = self._static.get(key, (None, -1, tensor))
            if seen is not tensor or version != tensor._version:
                copy = tensor.detach().clone()
                self._static[key] = (tensor, tensor._version, copy)
            copies[key] = copy
        taken = self._banks[step % 2].take([tensors[key] for key in moving])
        copies.update(zip(moving, taken, strict=True))
        return copies
