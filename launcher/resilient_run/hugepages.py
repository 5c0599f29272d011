"""Gathers this process's heap into huge pages: it forks faster, and its children end faster.

The one idea: both walk the page table, entry by entry. With torch imported that is some 55,000
entries of 4 KiB: a fork takes 11 ms, and a killed worker needs 16 to 28 ms until the kernel tells
anybody that it is dead, a good part of a recovery. In pages of 2 MiB it is 1.5 ms and 3 to 6 ms,
and a worker that writes still gets copies of single small pages. (Measured on a virtual machine
with two cores, Linux 6.18.) An older kernel, or one without huge pages, refuses, and nothing
changes.
"""

from __future__ import annotations

import ctypes

_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_BYTES = 2 << 20


def collapse_heap() -> int:
    """Returns the number of bytes that are in huge pages now because of this call."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, permissions, *rest = line.split()
        if not permissions.startswith("rw-p") or (len(rest) > 3 and rest[3] != "[heap]"):
            continue  # not private, or of a file
        start, end = (int(text, 16) for text in span.split("-"))
        start = -(-start // _HUGE_BYTES) * _HUGE_BYTES
        length = end // _HUGE_BYTES * _HUGE_BYTES - start
        if length > 0 and madvise(start, length, _MADV_COLLAPSE) == 0:
            num_bytes += length
    return num_bytes
