"""Plain state to MessagePack and back, the same in type and bits; never pickle.

A state is packed into a *node*: scalars, and dicts of scalars, stand for themselves, everything
else is an array that begins with a tag. So dict keys that are ints, tuples, Counters and numpy
values come back as what they were, which JSON or bare MessagePack would not give. Tensors are not
part of a node: a node names them, and the caller keeps them beside it (by reference, as a clone,
or in a file). Packing copies every container, so a node never changes with the object it came
from.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from resilient.errors import CheckpointCorrupt, ConfigError

Node = Any
"""What msgspec can encode: None, bool, int, float, str, bytes, dicts of those, and tagged lists."""

Put = Callable[[str, torch.Tensor], str]
"""Takes (path, tensor), keeps the tensor, and returns the key that a node will name it by."""

Get = Callable[[str, str], torch.Tensor]
"""Takes (key, device type the tensor had) and returns the tensor."""

_LIST, _TUPLE, _DICT, _ORDERED, _COUNTER, _DEFAULT, _SET, _FROZENSET, _DEQUE = range(9)
_TENSOR, _ARRAY, _NUMPY, _BIG, _SIZE, _DTYPE, _DEVICE, _COMPLEX = range(9, 17)

_PLAIN = frozenset({type(None), bool, float, str, bytes})
_PLAIN_INT = _PLAIN | {int}
_KEYS = frozenset({str, int})
_SEQUENCES: dict[type, int] = {
    list: _LIST,
    tuple: _TUPLE,
    set: _SET,
    frozenset: _FROZENSET,
    torch.Size: _SIZE,
}
_MAPPINGS: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED, Counter: _COUNTER}
_FACTORIES: dict[str | None, Any] = {
    None: None,
    **{kind.__name__: kind for kind in (int, float, list, dict, set, str)},
}


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raises ConfigError when the tensor is of a kind whose bytes are not its whole state."""
    kind = None
    if is_lazy(tensor):
        raise ConfigError(f"{path} is not initialised yet: run one batch through it, then protect")
    if tensor.is_meta:
        kind = "a meta tensor"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized or tensor.is_nested:
        kind = "a quantized or nested tensor"
    elif is_traceable_wrapper_subclass(tensor):
        kind = f"a {type(tensor).__name__}"
    if kind is not None:
        raise ConfigError(f"{path} is {kind}, which cannot be protected: give a dense tensor")


def pack(value: Any, path: str, put: Put) -> Node:
    """The value as a node.

    Args:
        path: where the value is, for keys and messages ("scheduler._last_lr.0").
        put: is given every tensor; a tensor met twice must get the same key.
    Raises:
        ConfigError: something in it is of a type that cannot be encoded; names path and type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        # MessagePack ends at 64 bits; numpy generators have integers of 128.
        return value if -(1 << 63) <= value < (1 << 64) else [_BIG, str(value)]
    if (
        kind is dict
        and _PLAIN_INT.issuperset(map(type, value.values()))
        and _KEYS.issuperset(map(type, value))
    ):
        return value.copy()  # most states are so simple, and are packed at every commit
    tag = _MAPPINGS.get(kind)
    if tag is not None:
        return _pack_items([tag], value, path, put)
    tag = _SEQUENCES.get(kind)
    if tag is not None:
        node: list[Any] = [tag]
        for index, item in enumerate(value):
            node.append(item if type(item) in _PLAIN else pack(item, f"{path}.{index}", put))
        return node
    if isinstance(value, torch.Tensor):
        check_tensor(value, path)
        return [_TENSOR, put(path, value), value.device.type]
    return _pack_rare(value, path, put)


def _pack_items(node: list[Any], value: Any, path: str, put: Put) -> Node:
    for key, item in value.items():
        node.append(key if type(key) in _PLAIN else pack(key, f"{path} (key {key!r})", put))
        node.append(item if type(item) in _PLAIN else pack(item, f"{path}.{key}", put))
    return node


def _pack_rare(value: Any, path: str, put: Put) -> Node:
    kind = type(value)
    if kind is complex:
        return [_COMPLEX, value.real, value.imag]
    if kind is torch.dtype:
        return [_DTYPE, str(value).removeprefix("torch.")]
    if kind is torch.device:
        return [_DEVICE, str(value)]
    if kind is deque:
        items = [pack(item, f"{path}.{index}", put) for index, item in enumerate(value)]
        return [_DEQUE, value.maxlen, *items]
    if kind is defaultdict:
        name = getattr(value.default_factory, "__name__", None)
        if _FACTORIES.get(name, _PLAIN) is value.default_factory:
            return _pack_items([_DEFAULT, name], value, path, put)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        dtype = value.dtype
        if not dtype.hasobject and dtype.fields is None:
            if kind is numpy.ndarray:
                return [_ARRAY, dtype.str, list(value.shape), value.tobytes()]
            if isinstance(value, numpy.generic):
                return [_NUMPY, dtype.str, value.tobytes()]
    raise ConfigError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept as state: let "
        "state_dict() return numbers, strings, tensors, arrays, and dicts, lists or tuples of them"
    )


def unpack(node: Node, get: Get) -> Any:
    """The value that was packed; get gives each tensor.

    Raises:
        CheckpointCorrupt: it is no node.
    """
    if type(node) is not list:
        return node.copy() if type(node) is dict else node
    tag = node[0] if node else None
    if tag == _TENSOR:
        return get(node[1], node[2])
    if tag in (_DICT, _ORDERED, _COUNTER):
        kind = (dict, OrderedDict, Counter)[tag - _DICT]
        return _unpack_items(kind(), node, 1, get)
    if tag == _DEFAULT:
        return _unpack_items(defaultdict(_FACTORIES[node[1]]), node, 2, get)
    if tag == _DEQUE:
        return deque((unpack(item, get) for item in node[2:]), node[1])
    if tag in (_LIST, _TUPLE, _SET, _FROZENSET, _SIZE):
        items = [unpack(item, get) for item in node[1:]]
        if tag == _LIST:
            return items
        return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _SIZE: torch.Size}[tag](items)
    if tag == _BIG:
        return int(node[1])
    if tag == _COMPLEX:
        return complex(node[1], node[2])
    if tag == _DEVICE:
        return torch.device(node[1])
    if tag == _DTYPE and isinstance(getattr(torch, node[1], None), torch.dtype):
        return getattr(torch, node[1])
    if tag in (_ARRAY, _NUMPY):
        import numpy

        if tag == _NUMPY:
            return numpy.frombuffer(node[2], dtype=node[1])[0]
        return numpy.frombuffer(node[3], dtype=node[1]).reshape(node[2]).copy()
    raise CheckpointCorrupt(f"the state holds an unknown tag {tag!r}")


def _unpack_items(mapping: Any, node: list[Any], start: int, get: Get) -> Any:
    for index in range(start, len(node), 2):
        mapping[unpack(node[index], get)] = unpack(node[index + 1], get)
    return mapping


_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """A node, or plain lists and dicts of nodes, as bytes."""
    try:
        return _encoder.encode(value)
    except OverflowError:
        return _encoder.encode(_without_big(value))
    except (UnicodeEncodeError, TypeError) as error:
        raise ConfigError(f"the state cannot be encoded: {error}") from None


def _without_big(value: Any) -> Any:
    """The same with the integers of more than 64 bits, in dicts of scalars, tagged."""
    if type(value) is dict:
        if not _PLAIN_INT.issuperset(map(type, value.values())):
            return {key: _without_big(item) for key, item in value.items()}
        node: list[Any] = [_DICT]
        for key, item in value.items():
            node += [pack(key, "", _no_tensors), pack(item, "", _no_tensors)]
        return node
    return [_without_big(item) for item in value] if type(value) is list else value


def _no_tensors(path: str, tensor: torch.Tensor) -> str:
    raise AssertionError("a dict of scalars holds no tensor")


def decode(data: bytes | memoryview) -> Any:
    """Raises CheckpointCorrupt on bytes that are no MessagePack."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"the state cannot be decoded: {error}") from None
