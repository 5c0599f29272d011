"""The random number generators of this process: Python's, numpy's, torch's, the device's.

Reading them would be most of what a healthy step costs (Python's takes 10 us as a tuple, numpy's
50 us), and most steps leave most of them alone. So a few words of the memory behind each generator
are compared with what they were, which takes under 1 us, and only a generator that moved is read
again, through its public call. The words are the position, which every draw moves, the spare
Gaussian, and eight of the 624 of the Mersenne twister, which differ when the position has gone
round or a seed was set (word 0 does not: a seed makes it a constant). The comparison is tried on
private generators first; where it cannot be trusted the public call is made each time.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from resilient.state.encoding import decode, encode

_NUM_WORDS = 9
_OBJECT_HEADER_BYTES = 16  # reference count and type: they move without a draw


def _view(address: int, num_bytes: int) -> memoryview:
    """That memory, as it changes; whoever owns it must live as long as the view."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _body(value: object) -> tuple[int, int]:
    """Where a C object lies after its header, and its size."""
    size = type(value).__basicsize__ - _OBJECT_HEADER_BYTES
    return id(value) + _OBJECT_HEADER_BYTES, size


def _view_python(value: random.Random) -> memoryview:
    """Position, and the first words of the state: the layout of RandomObject in CPython."""
    address, size = _body(value)
    return _view(address, min(size, 4 * (1 + _NUM_WORDS)))


def _trusted_for_python() -> bool:
    """Whether a draw or a seed always changes what is viewed, and nothing else does."""
    if sys.implementation.name != "cpython" or not hasattr(sys, "getrefcount"):
        return False
    trial = random.Random(1)
    view = _view_python(trial)
    seen = bytes(view)
    if bytes(view) != seen or view[0] + (view[1] << 8) != 624:
        return False
    draws = (trial.random, lambda: trial.getrandbits(5), lambda: trial.getrandbits(624 * 32))
    for draw in (*draws, lambda: trial.seed(2), lambda: trial.seed(3)):
        draw()
        if bytes(view) == seen:
            return False
        seen = bytes(view)
    return True


class _Python:
    """`random`'s hidden instance, as 2,500 bytes of state and the spare Gaussian."""

    def __init__(self) -> None:
        self._instance: Any = random._inst  # type: ignore[attr-defined]
        self._view = _view_python(self._instance) if _trusted_for_python() else None
        self._seen = b""
        self._value: list[Any] = []

    def read(self) -> list[Any]:
        seen = b"" if self._view is None else bytes(self._view)
        # the spare Gaussian is an attribute of Python's, beside the body
        if not seen or seen != self._seen or self._instance.gauss_next != self._value[2]:
            version, words, gauss = random.getstate()
            self._value = [version, array.array("I", words).tobytes(), gauss]
            self._seen = seen
        return self._value

    @staticmethod
    def write(value: list[Any]) -> None:
        version, words, gauss = value
        random.setstate((version, tuple(array.array("I", words)), gauss))


class _Numpy:
    """numpy's global RandomState, if anybody imported it."""

    def __init__(self) -> None:
        self._trusted: bool | None = None
        self._generator: Any = None
        self._views: tuple[memoryview, ...] | None = None
        self._seen: tuple[bytes, ...] | None = None
        self._value: list[Any] | None = None

    def read(self) -> list[Any] | None:
        module: Any = sys.modules.get("numpy.random")
        if module is None:
            return None
        state = module.mtrand._rand
        if state._bit_generator is not self._generator:
            self._generator = state._bit_generator
            if self._trusted is None:
                self._trusted = self._check(module)
            self._views = self._view_all(module, state) if self._trusted else None
        views = self._views
        seen = None if views is None else tuple(map(bytes, views))
        if seen is None or seen != self._seen:
            name, key, position, has_gauss, gauss = self._get(state)
            self._value = [name, key.tobytes(), position, has_gauss, gauss]
            self._seen = seen
        return self._value

    @staticmethod
    def _get(state: Any) -> tuple[Any, ...]:
        found = state.get_state(legacy=False)
        inner = found["state"]
        return (
            found["bit_generator"],
            inner["key"],
            inner["pos"],
            found["has_gauss"],
            found["gauss"],
        )

    @staticmethod
    def _view_all(module: Any, state: Any) -> tuple[memoryview, ...] | None:
        """What a draw changes: the generator's own state, and the spare Gaussian in `state`."""
        generator = state._bit_generator
        if type(generator) is not module.MT19937:
            return None
        # mt19937_state in numpy's sources: 624 words and the position, 32 bits each
        address = generator.ctypes.state_address
        words, position = _view(address, 4 * _NUM_WORDS), _view(address + 624 * 4, 4)
        return words, position, _view(*_body(state))

    def _check(self, module: Any) -> bool:
        """Whether each draw changes what is viewed, and nothing else does."""
        trial = module.RandomState(1)
        views = self._view_all(module, trial)
        if views is None:
            return False
        seen = tuple(map(bytes, views))
        if tuple(map(bytes, views)) != seen:
            return False
        # the second standard_normal() only hands out the spare one
        draws = (trial.random_sample, trial.standard_normal, trial.standard_normal)
        for draw in (*draws, lambda: trial.bytes(624 * 4), lambda: trial.seed(2)):
            draw()
            now = tuple(map(bytes, views))
            if now == seen:
                return False
            seen = now
        return True

    @staticmethod
    def write(value: list[Any]) -> None:
        import numpy

        name, key, position, has_gauss, gauss = value
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, gauss))


class _Torch:
    """torch's generator of the CPU."""

    def __init__(self) -> None:
        self._generator = torch.default_generator
        offset = self._trusted_offset()
        self._views = None if offset is None else self._view_all(self._generator, offset)
        if self._views and self._views[0][:8] != struct.pack("<Q", self._generator.initial_seed()):
            self._views = None
        self._seen: tuple[bytes, ...] | None = None
        self._value = b""

    def read(self) -> bytes:
        views = self._views
        seen = None if views is None else tuple(map(bytes, views))
        if seen is None or seen != self._seen:
            state = self._generator.get_state()
            value = ctypes.string_at(state.data_ptr(), state.numel())
            if value != self._value:  # the same seed set again moves what nobody sees
                self._value = value
            self._seen = seen
        return self._value

    @staticmethod
    def _view_all(generator: Any, offset: int) -> tuple[memoryview, ...]:
        """What a draw changes: CPUGeneratorImpl holds a mt19937 (seed, 32-bit left and next, 624
        words) and behind it a spare Gaussian of each precision."""
        start = generator._cdata + offset
        end = start + _TORCH_HEAD_BYTES + 624 * 4
        return _view(start, _TORCH_HEAD_BYTES + 4 * _NUM_WORDS), _view(end, _TORCH_TAIL_BYTES)

    @classmethod
    def _trusted_offset(cls) -> int | None:
        """Where the mt19937 is in the object; None unless each draw changes what is viewed, and
        nothing else does."""
        trial: Any = torch.Generator()  # _cdata is not in its stub
        seed = 0x1E57_5EED_0FF5_E7E5  # stands nowhere else in the object
        trial.manual_seed(seed)
        # In front of it is the base class; the object is larger than the 2,500 bytes of the words.
        offset = ctypes.string_at(trial._cdata, 256).find(struct.pack("<Q", seed))
        if offset < 0:
            return None
        views = cls._view_all(trial, offset)
        if views[0][8:12] != struct.pack("<i", 1):
            return None
        seen = tuple(map(bytes, views))
        if tuple(map(bytes, views)) != seen:
            return None
        draws = (
            lambda: torch.rand(1, generator=trial),
            # every second one only hands out the spare one
            *[lambda: torch.randn(1, generator=trial)] * 3,
            *[lambda: torch.randn(1, generator=trial, dtype=torch.float64)] * 3,
            lambda: torch.rand(624, generator=trial),
            lambda: torch.randperm(624 * 3, generator=trial),
            lambda: trial.manual_seed(2),
        )
        for draw in draws:
            draw()
            now = tuple(map(bytes, views))
            if now == seen:
                return None
            seen = now
        return offset

    @staticmethod
    def write(data: bytes) -> None:
        torch.set_rng_state(_as_tensor(data))


_TORCH_HEAD_BYTES = 20  # seed, left, whether it is seeded, next
_TORCH_TAIL_BYTES = 24  # std::optional<float>, std::optional<double>


class RandomState:
    """Reads all generators of this process into bytes, and writes them back.

    `read` returns the very same bytes object as long as nothing was drawn.
    """

    def __init__(self) -> None:
        self._python = _Python()
        self._numpy = _Numpy()
        self._torch = _Torch()
        self._parts: tuple[Any, ...] = (None, None, b"", b"")
        self._bytes = b""
        self._read_device = _device_reader()

    def read(self) -> bytes:
        """The state of every generator of this process.

        numpy's only if numpy.random was imported, the current device's only if it was initialised.
        """
        old = self._parts
        python, numpy, cpu = self._python.read(), self._numpy.read(), self._torch.read()
        device = self._read_device()
        if python is not old[0] or numpy is not old[1] or cpu is not old[2] or device != old[3]:
            self._parts = (python, numpy, cpu, device)
            self._bytes = encode(list(self._parts))
        return self._bytes

    def write(self, data: bytes) -> None:
        """Sets every generator to what `read` returned, in this process or in another.

        Raises:
            CheckpointCorrupt: the bytes are not such a state.
        """
        python, numpy, torch_state, device = decode(data)
        _Python.write(python)
        if numpy is not None:
            _Numpy.write(numpy)
        _Torch.write(torch_state)
        module = _device_module()
        if device and module is not None:
            module.set_rng_state(_as_tensor(device))


def seed_all(rank: int, step: int) -> None:
    """Seeds every generator from (rank, step): for a rank whose own state is nowhere held."""
    digest = hashlib.blake2b(f"{rank}:{step}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _device_module() -> Any:
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module()
    return module if hasattr(module, "get_rng_state") else None


def _device_reader() -> Callable[[], bytes]:
    """Reads the current device's generator; b"" while the device is not initialised.

    Asking would initialise it, and take the device before the process knows which is its own.
    """
    module = _device_module()
    if module is None:
        return lambda: b""
    is_initialized = getattr(module, "is_initialized", lambda: True)

    def read() -> bytes:
        if not is_initialized():
            return b""
        state = module.get_rng_state()
        return bytes(state.numpy())

    return read
