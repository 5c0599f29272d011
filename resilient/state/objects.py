"""Reads and writes what the user protects: modules, optimizers, scalers, and anything else.

The one idea: modules and optimizers are read directly, not through state_dict(). That gives each
tensor once (tied weights, a module given under two names), and a survivor's copies nothing.
Everything else speaks for itself through state_dict() and load_state_dict().
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilient.errors import ConfigError
from resilient.state.encoding import Node, check_tensor, pack, unpack
from resilient.state.optimizers import OptimizerEntry
from resilient.state.snapshot import Image, Tensors


class _Buffer(NamedTuple):
    """Where a buffer lives; it is read anew each time, since scripts replace the tensor."""

    key: str
    owner: nn.Module
    attribute: str


class Inventory:
    """Everything given to protect(), sorted by kind.

    Attributes:
        parameters: each once, by the first name it is met under; those of modules, then those that
            only an optimizer knows.
        always: keys of buffers that change without moving their version counter.
        static: keys of parameters that nothing trains (a frozen backbone).
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        self.parameters: Tensors = {}
        self.always: set[str] = set()
        self.static: set[str] = set()
        self.optimizers: list[OptimizerEntry] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self._buffers: list[_Buffer] = []
        self._extra: list[tuple[str, str, nn.Module]] = []  # protected name, path, submodule
        self._others: list[tuple[str, Any]] = []
        self._claimed: set[int] = set()
        self._hooked: list[Optimizer] = []
        modules: dict[str, list[str]] = {}
        for name, value in self.objects.items():
            if isinstance(value, nn.Module):
                modules[name] = self._add_module(name, value)
        for name, value in self.objects.items():
            if not isinstance(value, nn.Module):
                self._add_other(name, value)
        trained = {id(p) for entry in self.optimizers for p in entry.params}
        for keys in modules.values():
            if any(id(self.parameters[key]) in trained for key in keys):
                # only beside trained ones: a module without any is an average that code updates
                self.static.update(
                    key
                    for key in keys
                    if not self.parameters[key].requires_grad
                    and id(self.parameters[key]) not in trained
                )

    @property
    def hooked(self) -> list[Optimizer]:
        """Every optimizer whose step makes the state dirty."""
        return self._hooked

    # ------------------------------------------------------------ what is there

    def _add_module(self, name: str, module: nn.Module) -> list[str]:
        keys = []
        for path, param in module.named_parameters():
            key = f"{name}.{path}"
            check_tensor(param, key)
            if id(param) not in self._claimed:
                self._claimed.add(id(param))
                self.parameters[key] = param
                keys.append(key)
        for path, owner in module.named_modules():
            prefix = f"{name}.{path}." if path else f"{name}."
            self._add_buffers(prefix, owner)
            has_extra = type(owner).get_extra_state is not nn.Module.get_extra_state
            if has_extra and id(owner) not in self._claimed:
                self._claimed.add(id(owner))
                self._extra.append((name, path, owner))
        return keys

    def _add_buffers(self, prefix: str, owner: nn.Module) -> None:
        is_norm = isinstance(owner, nn.modules.batchnorm._NormBase)
        for attribute, buffer in owner._buffers.items():
            if buffer is None or id(buffer) in self._claimed:
                continue
            key = prefix + attribute
            check_tensor(buffer, key)
            self._claimed.add(id(buffer))
            self._buffers.append(_Buffer(key, owner, attribute))
            if is_norm:
                self.always.add(key)

    def _add_other(self, name: str, value: Any) -> None:
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise ConfigError(
                f"job.protect({name}=...) is a {type(value).__name__} without state_dict() and "
                "load_state_dict(): give an object that has both"
            )
        if isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
        if isinstance(value, Optimizer):
            self._add_optimizer(name, value)
            return
        if hasattr(value, "param_groups") and callable(getattr(value, "step", None)):
            raise ConfigError(
                f"job.protect({name}=...) is a {type(value).__name__}, an optimizer without "
                "torch's step hooks: protect the torch.optim.Optimizer that it drives"
            )
        self._others.append((name, value))

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        kind = type(optimizer).__name__
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise ConfigError(
                f"job.protect({name}=...) is a {kind}, which keeps another part of its state on "
                "each rank: use an optimizer that keeps all of it"
            )
        if not getattr(
            type(optimizer).step, "hooked", False
        ) or "_optimizer_step_pre_hooks" not in (vars(optimizer)):
            raise ConfigError(
                f"job.protect({name}=...) is a {kind} whose step() runs no torch step hooks: call "
                "torch.optim.Optimizer.__init__() in it"
            )
        given = [id(value) for value in self.objects.values()]
        for attribute, inner in vars(optimizer).items():
            if isinstance(inner, Optimizer) and id(inner) not in given:
                raise ConfigError(
                    f"job.protect({name}=...) drives another optimizer in .{attribute}: protect "
                    "that one too, under a name of its own"
                )
        if any(other is optimizer for other in self._hooked):
            return  # given twice under two names
        self._hooked.append(optimizer)
        own_format = (
            type(optimizer).state_dict is not Optimizer.state_dict
            or type(optimizer).load_state_dict is not Optimizer.load_state_dict
        )
        entry = OptimizerEntry(name, optimizer)
        for index, param in enumerate(entry.params):
            key = f"{name}.param.{index}"
            check_tensor(param, key)
            if id(param) not in self._claimed:
                self._claimed.add(id(param))
                self.parameters[key] = param
        if own_format:
            self._others.append((name, optimizer))  # only it knows what its state is
        else:
            self.optimizers.append(entry)

    # ------------------------------------------------------------ reading

    def read_small(self) -> tuple[dict[str, Node], Tensors]:
        """What is neither module nor plain optimizer: nodes by name, and copies of its tensors."""
        tree: dict[str, Node] = {}
        copies: Tensors = {}

        def put(key: str, tensor: Tensor) -> str:
            while key in copies:
                key += "'"  # {"a": {"b": x}, "a.b": y}
            copies[key] = tensor.detach().clone()
            return key

        for name, path, owner in self._extra:
            label = f"{name}.{path}._extra_state"
            tree[label] = pack(owner.get_extra_state(), label, put)
        for name, value in self._others:
            if isinstance(value, torch.amp.GradScaler):
                state = _scaler_state(value)
            else:
                state = value.state_dict()
            tree[name] = pack(state, name, put)
        return tree, copies

    def read_buffers(self) -> Tensors:
        """The buffers as they are now, by reference."""
        found = ((b.key, b.owner._buffers.get(b.attribute)) for b in self._buffers)
        return {key: tensor for key, tensor in found if tensor is not None}

    # ------------------------------------------------------------ writing

    def begin_scales(self) -> None:
        """Has each scaler make its scale, as it would when it scales its first loss: a rank without
        a part in a batch scales none, and yet unscales the others' gradients."""
        for scaler in self.scalers:
            if scaler.is_enabled() and scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))

    def check(self, image: Image, modules_only: bool = False) -> None:
        """Raises ConfigError when the image is not of these objects; names what differs."""
        for key, tensor in image.parameters.items():
            self.check_parameter(key, tensor.dtype, tensor.shape)
        for key in self.parameters:
            if key not in image.parameters:
                raise ConfigError(
                    f"{key} is not in the state to be restored: build the same model at each entry"
                )
        if modules_only:
            return
        names = set(image.tree)
        mine = {name for name, _ in self._others} | {entry.name for entry in self.optimizers}
        mine |= {f"{name}.{path}._extra_state" for name, path, _ in self._extra}
        if names != mine:
            raise ConfigError(
                f"job.protect() was given {', '.join(sorted(mine)) or 'nothing'} beside modules, "
                f"the state to be restored holds {', '.join(sorted(names)) or 'nothing'}: protect "
                "the same objects at each entry"
            )
        for entry in self.optimizers:
            entry.check(image.tree[entry.name])

    def check_parameter(self, key: str, dtype: torch.dtype, shape: Any) -> Tensor:
        param = self.parameters.get(key)
        if param is None:
            raise ConfigError(
                f"the state to be restored holds {key}, which the protected objects lack: build "
                "the same model at each entry"
            )
        if tuple(param.shape) != tuple(shape) or param.dtype != dtype:
            raise ConfigError(
                f"{key} is {tuple(param.shape)} of {param.dtype}, in the state to be restored "
                f"{tuple(shape)} of {dtype}: build the same model at each entry"
            )
        return param

    def memory_for(
        self, section: str, key: str, dtype: torch.dtype, shape: Any, kind: str
    ) -> Tensor:
        """Where a tensor that arrives is to be written.

        Parameters and buffers: the objects' own memory. Optimizer state: new memory that `restore`
        will adopt.
        """
        if section == "parameters":
            return self.check_parameter(key, dtype, shape).detach()
        if section == "buffers":
            mine = self.read_buffers().get(key)
            if mine is not None and mine.shape == tuple(shape) and mine.dtype == dtype:
                return mine.detach()
        if section == "states":
            for entry in self.optimizers:
                if key.startswith(f"{entry.name}.state."):
                    return entry.place(key, None, dtype, shape, kind)
        return torch.empty(shape, dtype=dtype)

    def restore(self, image: Image, modules_only: bool = False) -> None:
        """Makes the objects what the image says; what is already in place is not copied.

        Raises:
            ConfigError: the image is of other objects; nothing was written.
        """
        self.check(image, modules_only)
        slots = self._slots_for(image.buffers)
        with torch.no_grad():
            for key, param in self.parameters.items():
                saved = image.parameters[key]
                if saved.data_ptr() != param.data_ptr() or saved.device != param.device:
                    param.copy_(saved)
            for key, slot in slots.items():
                _write_buffer(slot, image.buffers[key])
        if modules_only:
            return
        for name, path, owner in self._extra:
            owner.set_extra_state(self._unpack(image, f"{name}.{path}._extra_state"))
        for entry in self.optimizers:
            node = image.tree[entry.name]
            entry.write_groups(node)
            entry.write_state(node, image.states)
        for name, value in self._others:
            state = self._unpack(image, name)
            if isinstance(value, torch.amp.GradScaler):
                state = {k: v.item() if isinstance(v, Tensor) else v for k, v in state.items()}
            value.load_state_dict(state)
        for entry in self.optimizers:
            entry.write_groups(image.tree[entry.name])

    def _unpack(self, image: Image, name: str) -> Any:
        def get(key: str, kind: str) -> Tensor:
            tensor = image.others[key].clone()  # the object may keep it and write to it
            if kind == "cpu" or not torch.accelerator.is_available():
                return tensor
            return tensor.to(torch.accelerator.current_accelerator())

        return unpack(image.tree[name], get)

    def _slots_for(self, saved: Tensors) -> dict[str, _Buffer]:
        slots = {buffer.key: buffer for buffer in self._buffers}
        for key in saved:
            if key not in slots:
                slot = self._find_slot(key)
                if slot is None:
                    raise ConfigError(
                        f"the state to be restored holds the buffer {key}, which the protected "
                        "objects lack: build the same model at each entry"
                    )
                self._buffers.append(slot)
                slots[key] = slot
        return {key: slots[key] for key in saved}

    def _find_slot(self, key: str) -> _Buffer | None:
        """A buffer that this object registered as None, or will register at its first forward."""
        name, _, path = key.partition(".")
        owner = self.objects.get(name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        if not isinstance(owner, nn.Module):
            return None
        if attribute in owner._buffers:
            return _Buffer(key, owner, attribute)
        if getattr(owner, attribute, None) is None:
            if hasattr(owner, attribute):
                delattr(owner, attribute)
            owner.register_buffer(attribute, None)
            return _Buffer(key, owner, attribute)
        return None


def _write_buffer(slot: _Buffer, saved: Tensor) -> None:
    mine = slot.owner._buffers.get(slot.attribute)
    if mine is None or mine.shape != saved.shape or mine.dtype != saved.dtype:
        like = next(slot.owner.parameters(), saved) if mine is None else mine
        slot.owner._buffers[slot.attribute] = saved.detach().to(like.device, copy=True)
    elif mine.data_ptr() != saved.data_ptr() or mine.device != saved.device:
        mine.copy_(saved)


def _scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """As scaler.state_dict(), without waiting for the device: the tensors are copied as such."""
    if not scaler.is_enabled():
        return {}
    scale, tracker = scaler._scale, scaler._growth_tracker
    return {
        "scale": scaler._init_scale if scale is None else scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker,
    }
