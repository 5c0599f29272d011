"""Bounds what a lost DNS packet costs a TCPStore connection.

Torch looks up the name of both ends of each store connection, only to be able to print it. The
addresses are IPv4 mapped into IPv6, which /etc/hosts does not answer, so the question goes out to a
name server. Where that is slow, or loses one packet in a thousand, a connection that takes 1 ms
takes 5 s (seen: one start of a generation in 25). Torch has no switch for it; but glibc has the
state of the resolver, of each thread its own, and in it how long to wait before asking again: one
second is the least. (With no name server at all torch would print a warning each time.)

A server is spared the question by a listening socket that is IPv4 only (`master_listen_fd`).
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


class _State(ctypes.Structure):
    """The beginning of glibc's `struct __res_state`; it is part of its ABI."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
    )


@contextlib.contextmanager
def impatient_resolver() -> Iterator[None]:
    """In this thread, an unanswered DNS question is asked again after one second, once.

    With another C library nothing is changed.
    """
    state = _state_of_thread()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = 1, 2
    try:
        yield
    finally:
        state.retrans, state.retry = before


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
    )
    return state if looks_right else None
