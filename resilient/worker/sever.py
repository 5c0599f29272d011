"""Breaks this process's collective connections, so that nothing stays blocked in one.

Torch has no call that frees a thread from a gloo collective: abort(), shutdown() and
destroy_process_group() return at once and leave it there (torch 2.13). But the thread waits for
sockets, and shutdown(2) on those ends the wait within milliseconds, with an exception. So the one
idea is to find the right sockets of this process and to shut them down, from any thread.

Which are the right ones: each gloo device has a thread named "gloo_tcp_loop" in epoll_wait; /proc
says on which epoll it waits, and what that watches. The store client's connection is the one whose
peer has the store's port. The user's own sockets are never touched, nor is a listening one (gloo
would terminate the process).

One wait has no socket: in group creation gloo waits for a peer that shall connect *to us*, and if
that peer is frozen just then, for five times the group's timeout. Then we knock: connect to our own
gloo listener as that peer would (it sends the pair's number, eight bytes), and hang up.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOP_THREAD_NAME = "gloo_tcp_loop"
_KNOCK_TIMEOUT_S = 0.1


def sever_gloo(knocks: range = range(0)) -> int:
    """Shuts down every connected gloo socket of this process.

    Sockets are also opened later (groups made lazily, connections in the making), so a caller that
    wants a thread out repeats this until it is.

    Args:
        knocks: pair numbers to knock with, see above; the first world_size numbers are those of a
            device's first group.
    Returns:
        How many were shut down, those included that had been before.
    """
    num_severed = 0
    for fd in _gloo_fds():
        with _duplicate(fd) as sock:
            if sock is None:
                continue
            if _listens(sock):
                _knock(sock, knocks)
            else:
                num_severed += _shut_down(sock)
    return num_severed


def sever_store(port: int) -> int:
    """Shuts down the connections of this process to that TCP port; returns how many."""
    num_severed = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        except OSError:  # closed meanwhile
            continue
        with _duplicate(int(name)) as sock:
            if sock is not None and _peer_port(sock) == port:
                num_severed += _shut_down(sock)
    return num_severed


def num_gloo_links() -> int:
    """Number of gloo's connections that are up; one that a peer has ended, gloo closes."""
    num_links = 0
    for fd in _gloo_fds():
        with _duplicate(fd) as sock:
            if sock is not None and _peer_port(sock) is not None:
                num_links += 1
    return num_links


def _gloo_fds() -> list[int]:
    """What the epolls of all gloo threads watch: connections, connecting sockets, listeners."""
    fds: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            if _read(f"/proc/self/task/{task}/comm").strip() != _LOOP_THREAD_NAME:
                continue
            epoll_fd = _epoll_of(task)
            if epoll_fd is None:
                continue
            lines = _read(f"/proc/self/fdinfo/{epoll_fd}").splitlines()
            fds += [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
        except OSError:  # the thread or its epoll is gone: so are its sockets
            continue
    return fds


def _epoll_of(task: str) -> int | None:
    """The descriptor that a thread in epoll_wait waits on; None if it never is in a system call."""
    for _ in range(50):
        words = _read(f"/proc/self/task/{task}/syscall").split()
        if len(words) > 1 and words[0] != "-1":
            return int(words[1], 16)
        time.sleep(0.0005)  # "running": between two waits
    return None


@contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket | None]:
    """A socket over a copy of fd, so that the number cannot be closed and reused under us."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with sock:
        yield sock if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def _listens(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return True  # unknown is left alone


def _peer_port(sock: socket.socket) -> int | None:
    try:
        return int(sock.getpeername()[1])
    except OSError:
        return None


def _shut_down(sock: socket.socket) -> int:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0
    return 1


def _knock(listener: socket.socket, numbers: range) -> None:
    try:
        address = listener.getsockname()
        for number in numbers:
            with socket.socket(listener.family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_KNOCK_TIMEOUT_S)
                caller.connect(address)
                caller.sendall(struct.pack("=q", number))
    except OSError:  # closed meanwhile, or its backlog is full: the next round tries again
        return


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
