"""Keeps the modules that a train function builds, for its next entry in the same process.

The same module object again means the same parameters, so a survivor has its state without copying
anything. That is only safe while the train function leaves a module alone between build() and
protect(): one that it initialises itself would be initialised again at the next entry, over trained
weights. So the first time it is watched; one that was changed is built anew at each entry, and
restored as a stranger's would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Key = tuple[str, int]


class BuildCache:
    """Modules by (name of the factory, number of the call in its entry)."""

    def __init__(self) -> None:
        self._modules: dict[Key, nn.Module] = {}
        self._watched: dict[Key, list[int]] = {}  # built in this entry: what they were
        self._changing: set[Key] = set()
        self._num_calls = 0

    def begin_entry(self) -> None:
        self._num_calls = 0
        for key in self._watched:  # that entry ended before protect(): nothing is known of them
            del self._modules[key]
        self._watched.clear()

    def build(self, factory: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The module of this call: the one of the last entry, or a new one on the device."""
        key = (_name_of(factory), self._num_calls)
        self._num_calls += 1
        module = self._modules.get(key)
        if module is None or not _is_on(module, device):
            module = factory().to(device)
            if key not in self._changing:
                self._modules[key] = module
                self._watched[key] = _fingerprint(module)
        return module

    def begin_protect(self) -> None:
        """Forgets the modules that were changed since they were built."""
        for key, seen in self._watched.items():
            if _fingerprint(self._modules[key]) != seen:
                self._changing.add(key)
                del self._modules[key]
        self._watched.clear()

    def drop(self) -> None:
        """The next entry begins anew."""
        self._modules.clear()
        self._watched.clear()


def _name_of(factory: Any) -> str:
    factory = getattr(factory, "func", factory)  # functools.partial
    kind = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_on(module: nn.Module, device: torch.device) -> bool:
    return all(tensor.device.type == device.type for tensor in module.parameters())


def _fingerprint(module: nn.Module) -> list[int]:
    """A sum over the bits of every parameter.

    Version counters would not do: `weight.data.normal_()`, a usual way to initialise, does not move
    them.
    """
    sums = []
    for param in module.parameters():
        if nn.parameter.is_lazy(param) or param.is_meta:
            sums.append(0)
            continue
        data = param.detach().contiguous().view(-1)
        sums.append(int(data.view(torch.uint8).sum(dtype=torch.int64)))
    return sums
