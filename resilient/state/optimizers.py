"""Reads and writes one torch optimizer.

The one idea: it is read at every commit and hardly ever changes but in its tensors, which are held
by reference. So what was read before is compared by identity, in a microsecond; and a survivor's
state tensors are adopted by the new optimizer instead of being copied.
"""

from __future__ import annotations

from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilient.errors import ConfigError
from resilient.state.encoding import Node, pack, unpack
from resilient.state.snapshot import Tensors

_ONLY_DICTS = frozenset({dict})
_values_of = methodcaller("values")
_IMMUTABLE = (type(None), bool, int, float, str, bytes)


class OptimizerEntry:
    """One torch optimizer: hyperparameters (small state) and the state of each parameter (big)."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self.params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._num_groups = len(optimizer.param_groups)
        self.states: Tensors = {}
        self.tensors: list[Tensor] = []
        self._values: list[Any] | None = None  # None: always read the long way
        self._state_node: Node = None
        self._group_values: list[list[Any] | None] = []
        self._group_nodes: list[Node] = []
        self._groups_node: Node = None

    def has_new_groups(self) -> bool:
        return len(self.optimizer.param_groups) != self._num_groups

    def read(self) -> Node:
        """Its node: hyperparameters, and the places of the state tensors.

        `states` and `tensors` are new objects if, and only if, something in them is.
        """
        groups = self._read_groups()
        states = self.optimizer.state.values()
        simple = _ONLY_DICTS.issuperset(map(type, states))
        values = list(chain.from_iterable(map(_values_of, states))) if simple else []
        old = self._values
        if simple and old is not None and len(old) == len(values) and all(map(is_, old, values)):
            return [groups, self._state_node]
        simple = simple and all(isinstance(v, (*_IMMUTABLE, Tensor)) for v in values)
        self._values = values if simple else None
        self.states, keys = {}, {}

        def put(key: str, tensor: Tensor) -> str:
            if id(tensor) not in keys:
                keys[id(tensor)] = key
                self.states[key] = tensor
            return keys[id(tensor)]

        indexes = {id(param): index for index, param in enumerate(self.params)}
        node: list[Any] = []
        for owner, state in self.optimizer.state.items():
            index = indexes.get(id(owner)) if isinstance(owner, Tensor) else owner
            if index is not None:
                path = f"{self.name}.state.{index}"
                node.append([pack(index, path, put), pack(state, path, put)])
        self._state_node = node
        self.tensors = list(self.states.values())
        return [groups, node]

    def _read_groups(self) -> list[Node]:
        """Schedulers write into the groups, so they are looked at each time; packing is rare."""
        groups = self.optimizer.param_groups
        if len(self._group_values) != len(groups):
            self._group_values = [None] * len(groups)
            self._group_nodes = [None] * len(groups)
        changed = False
        for index, group in enumerate(groups):
            values = list(group.values())
            old = self._group_values[index]
            if old is not None and len(old) == len(values) and all(map(is_, old, values)):
                continue
            changed = True
            path = f"{self.name}.param_groups.{index}"
            rest = {key: value for key, value in group.items() if key != "params"}
            self._group_nodes[index] = pack(_numbers(rest), path, _refuse)
            flat = [
                item
                for value in rest.values()
                for item in (value if type(value) is tuple else (value,))
            ]
            immutable = all(isinstance(item, _IMMUTABLE) for item in flat)
            self._group_values[index] = values if immutable else None
        if changed:  # a new list: images keep the old one
            sizes = [len(group["params"]) for group in groups]
            self._groups_node = [list(self._group_nodes), sizes]
        return self._groups_node

    def check(self, node: Node) -> None:
        """Raises ConfigError when the groups are not those the node was made of."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != node[0][1]:
            raise ConfigError(
                f"{self.name} has parameter groups of {sizes} parameters, the state to be restored "
                f"{node[0][1]}: make the same groups before job.protect()"
            )

    def place(
        self, key: str, tensor: Tensor | None, dtype: torch.dtype, shape: Any, kind: str
    ) -> Tensor:
        """Memory for one state tensor: `tensor` itself where it fits, else new and filled.

        It lies on its parameter's device, in its parameter's memory format, except a `step` that is
        kept on the CPU (as Optimizer.load_state_dict does it).
        """
        parts = key.removeprefix(f"{self.name}.state.").split(".")
        index = int(parts[0]) if parts[0].isdigit() else -1
        if not 0 <= index < len(self.params):
            return tensor if tensor is not None else torch.empty(shape, dtype=dtype)
        param = self.params[index]
        device = param.device
        if kind == "cpu" and parts[-1] == "step" and not self._steps_on_device(index):
            device = torch.device("cpu")
        if tuple(shape) == tuple(param.shape):
            empty = torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
        else:
            empty = torch.empty(shape, dtype=dtype, device=device)
        if tensor is None:
            return empty
        if tensor.device == device and tensor.stride() == empty.stride():
            return tensor
        return empty.copy_(tensor)

    def _steps_on_device(self, index: int) -> bool:
        for group in self.optimizer.param_groups:
            if index < len(group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
            index -= len(group["params"])
        return False

    def write_groups(self, node: Node) -> None:
        """Last of all: a scheduler's load_state_dict may have written the rate of its own."""
        for group, saved in zip(self.optimizer.param_groups, node[0][0], strict=True):
            for key, value in unpack(saved, _no_tensor).items():
                old = group.get(key)
                if isinstance(old, Tensor):
                    with torch.no_grad():
                        old.fill_(value)
                else:
                    group[key] = value

    def write_state(self, node: Node, states: Tensors) -> None:
        """Adopts the tensors of `states` where they fit, so a survivor copies nothing."""

        def get(key: str, kind: str) -> Tensor:
            tensor = states[key]
            return self.place(key, tensor, tensor.dtype, tensor.shape, kind)

        self.optimizer.state.clear()
        for index_node, state in node[1]:
            index = unpack(index_node, _no_tensor)
            owner = self.params[index] if isinstance(index, int) else index
            self.optimizer.state[owner] = unpack(state, get)
        self._values = None


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A rate kept in a tensor (capturable optimizers) as its number; `write_groups` fills it in."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
    }


def _refuse(path: str, tensor: Tensor) -> str:
    raise ConfigError(f"{path} is a tensor, which cannot be kept as a hyperparameter: use numbers")


def _no_tensor(key: str, kind: str) -> Tensor:
    raise ConfigError(f"{key} is a tensor where none can be")
