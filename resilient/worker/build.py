"""Keeps the modules that a train function builds, for its next entry in the same process.

The same module object again means the same parameters, so a survivor has its state without copying
anything. That is only safe while the train function leaves a module alone between build() and
protect(): one that it initialises itself would be initialised again at the next entry, over trained
weights. `Protected` finds that out at the first entry; then modules are built anew each time, and
restored as a stranger's would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from resilient.state.protect import Protected

Key = tuple[str, int]


class BuildCache:
    """Modules by (name of the factory, number of the call in its entry)."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._modules: dict[Key, nn.Module] = {}
        self._num_calls = 0

    def begin_entry(self) -> None:
        self._num_calls = 0
        if not self._protected.may_reuse:
            self.drop()

    def build(self, factory: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The module of this call: the one of the last entry, or a new one on the device."""
        key = (_name_of(factory), self._num_calls)
        self._num_calls += 1
        module = self._modules.get(key)
        if module is None or not _is_on(module, device):
            module = factory().to(device)
            self._modules[key] = module
        self._protected.built(module)
        return module

    def drop(self) -> None:
        """The next entry begins anew."""
        self._modules.clear()


def _name_of(factory: Any) -> str:
    factory = getattr(factory, "func", factory)  # functools.partial
    kind = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_on(module: nn.Module, device: torch.device) -> bool:
    return all(tensor.device.type == device.type for tensor in module.parameters())
