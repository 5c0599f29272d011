"""Breaks this process's collective connections, so that nothing stays blocked in one.

Torch has no call that frees a thread from a gloo collective: abort(), shutdown() and
destroy_process_group() return at once and leave it there (torch 2.13). But the thread waits for
sockets, and shutdown(2) on those ends the wait within milliseconds, with an exception. So the one
idea is to find the right sockets of this process and to shut them down, from any thread.

Which are the right ones: each gloo device has a thread named "gloo_tcp_loop" in epoll_wait; /proc
says on which epoll it waits, and what that watches. The store client's connection is the one whose
peer has the store's port. The user's own sockets are never touched, nor is a listening one (gloo
would terminate the process).

Three things that gloo cannot stand are dealt with:

* A write that fails in its own thread, in answer to a message that was still in the queue, loses
  the operation it was for, and whoever waits for that is never told. So only the reading half is
  shut down (what is queued is still read, and answered), and the connection is *held*, by a copy of
  its descriptor, until every peer has come out too: gloo's close() then breaks no peer's write.
* In group creation gloo waits for a peer that shall connect *to us*, and if that peer is frozen
  just then, for five times the group's timeout; there is no socket to shut down. Then we knock:
  connect to our own gloo listener as that peer would (it sends the pair's number, eight bytes), and
  hang up.
* With two operations in flight, the one that fails first takes its memory along, and the message
  that was just arriving for it is never read to its end: the connection stands still, its end goes
  unnoticed, and the second operation waits on it for the group's timeout (seen: one sever in 50).
  Only a write finds out. So where a thread does not come out, the writing half is shut down too,
  and each group is *provoked*: it is told to send a byte to each peer, fails, and tells everyone.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import torch
from torch.distributed import distributed_c10d

_LOOP_THREAD_NAME = "gloo_tcp_loop"
_KNOCK_TIMEOUT_S = 0.1


class Severed:
    """The gloo connections that were severed, held until it is safe to close them."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}  # by inode
        self._provocations: list[Any] = []

    def sever_gloo(self, knocks: range = range(0)) -> int:
        """Shuts down every connected gloo socket of this process.

        Sockets are also opened later (groups made lazily, connections in the making), so a caller
        that wants a thread out repeats this until it is.

        Args:
            knocks: pair numbers to knock with, see above; the first world_size numbers are those
                of a device's first group.
        Returns:
            How many were found that had not been severed before.
        """
        num_new = 0
        for fd, inode in _gloo_fds():
            if inode in self._held:
                continue
            sock = _duplicate(fd, inode)
            if sock is None:
                continue
            if _listens(sock):
                _knock(sock, knocks)
                sock.close()
            else:
                _shut_down(sock, socket.SHUT_RD)
                self._held[inode] = sock
                num_new += 1
        return num_new

    def provoke(self) -> None:
        """Has every gloo group notice that its connections are gone, by writing to each peer."""
        for sock in self._held.values():
            _shut_down(sock, socket.SHUT_RDWR)
        byte = torch.zeros(1, dtype=torch.uint8)
        for group in list(distributed_c10d._world.pg_map):
            for peer in range(group.size()):
                if peer == group.rank():
                    continue
                try:
                    self._provocations.append((group.send([byte], peer, 0), byte))
                except RuntimeError:  # it knows already
                    pass

    def release(self) -> None:
        """Closes them: nobody waits for any of their peers any more."""
        self._provocations.clear()
        while self._held:
            self._held.popitem()[1].close()


def sever_store(host: str, port: int) -> int:
    """Shuts down this process's connections to that address (a number); returns how many."""
    num_severed = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
        except OSError:  # closed meanwhile
            continue
        sock = _duplicate(int(name), int(inode.strip("[]"))) if kind == "socket" else None
        if sock is not None:
            if _is_peer(sock, host, port) and _shut_down(sock, socket.SHUT_RDWR):
                num_severed += 1
            sock.close()
    return num_severed


def num_gloo_links() -> int:
    """Number of gloo's connections that are up; one that a peer has ended, gloo closes."""
    num_links = 0
    for fd, inode in _gloo_fds():
        sock = _duplicate(fd, inode)
        if sock is not None:
            num_links += _peer_port(sock) is not None
            sock.close()
    return num_links


def _gloo_fds() -> list[tuple[int, int]]:
    """What the epolls of all gloo threads watch: connections, connecting sockets, listeners.

    Returns (descriptor, inode) of each.
    """
    fds: list[tuple[int, int]] = []
    tasks = os.listdir("/proc/self/task")
    for ended in _known_epolls.keys() - set(tasks):
        _known_epolls.pop(ended, None)
    for task in tasks:
        try:
            if _read(f"/proc/self/task/{task}/comm").strip() != _LOOP_THREAD_NAME:
                continue
            epoll_fd = _epoll_of(task)
            if epoll_fd is None:
                continue
            for line in _read(f"/proc/self/fdinfo/{epoll_fd}").splitlines():
                words = line.replace("tfd:", "tfd: ").replace("ino:", "ino: ").split()
                if words[:1] == ["tfd:"] and "ino:" in words:
                    fds.append((int(words[1]), int(words[words.index("ino:") + 1], 16)))
        except OSError:  # the thread or its epoll is gone: so are its sockets
            continue
    return fds


_known_epolls: dict[str, int] = {}
"""By thread, as last seen: one that never comes to rest in epoll_wait cannot be asked."""


def _epoll_of(task: str) -> int | None:
    """The descriptor that a thread in epoll_wait waits on; None if it was never seen to wait."""
    for _ in range(3 if task in _known_epolls else 50):
        words = _read(f"/proc/self/task/{task}/syscall").split()
        if len(words) > 1 and words[0] != "-1":
            _known_epolls[task] = int(words[1], 16)
            break
        time.sleep(0.0005)  # "running": between two waits
    return _known_epolls.get(task)


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """A TCP socket over a copy of fd; None when it is closed, or by now something else."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.fstat(copy).st_ino == inode:
            sock = socket.socket(fileno=copy)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                return sock
            sock.close()
            return None
    except OSError:  # no socket
        pass
    os.close(copy)
    return None


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


def _is_peer(sock: socket.socket, host: str, port: int) -> bool:
    try:
        address = sock.getpeername()
    except OSError:
        return False
    # An IPv4 address may show as one mapped into IPv6.
    return bool(address[1] == port and address[0].removeprefix("::ffff:") == host)


def _shut_down(sock: socket.socket, how: int) -> bool:
    try:
        sock.shutdown(how)
    except OSError:
        return False
    return True


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
    with open(path, errors="replace") as file:  # a thread may have any bytes for its name
        return file.read()
