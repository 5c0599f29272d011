"""Keeps torch's TCPStore from asking a name server what the loopback address is called.

Torch looks up the names of both ends of each store connection, only to be able to print them.
Where the addresses are IPv4 mapped into IPv6, /etc/hosts does not answer and the question goes out;
a name server that is slow, or loses one packet in a thousand, then makes a connection of 1 ms take
5 s (seen: one start of a generation in 25). Torch has no switch for it.

In glibc each thread has a resolver state of its own: without a name server in it such a question
ends at once. Torch then logs a warning that it has no name to print; the launcher sets
TORCH_CPP_LOG_LEVEL=ERROR unless the user has set it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

_RES_INIT = 1
_MAX_RETRANS_S = 30  # RES_MAXRETRANS of resolv.h
_MAX_TRIES = 5  # RES_MAXRETRY
_MAX_SERVERS = 3  # MAXNS


class _State(ctypes.Structure):
    """The beginning of glibc's `struct __res_state`; it is part of its ABI."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """In this thread, names and addresses come from /etc/hosts alone.

    With another C library nothing is changed. Only for connections whose address is a number.
    """
    state = _state_of_thread()
    if state is None:
        yield
        return
    before = state.nscount
    state.nscount = 0
    try:
        yield
    finally:
        state.nscount = before


@functools.cache
def _glibc() -> Any:
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("gnu_get_libc_version", "__res_state")):
        return None
    libc.__res_state.restype = ctypes.POINTER(_State)
    return libc


def _state_of_thread() -> _State | None:
    libc = _glibc()
    if libc is None:
        return None
    pointer = libc.__res_state()
    state: _State = pointer.contents
    if not state.options & _RES_INIT and hasattr(libc, "__res_ninit"):
        libc.__res_ninit(pointer)
    # A last look before anything is written: this is what such a state looks like.
    looks_right = (
        state.options & _RES_INIT
        and 0 < state.retrans <= _MAX_RETRANS_S
        and 0 < state.retry <= _MAX_TRIES
        and 0 <= state.nscount <= _MAX_SERVERS
    )
    return state if looks_right else None
