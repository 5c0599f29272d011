"""Answers `resilient status`: a Unix socket in the run directory, one JSON object a connection.

The one idea: whoever asks gets what the agent knows anyway; nothing is collected for it, and
nothing that a client does or fails to do can hold the agent up. Only the same user, or root, is
answered.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

SOCKET_NAME = "status.sock"


class StatusServer:
    """Serves until closed.

    Args:
        describe: gives the JSON object.
    """

    def __init__(self, directory: str, describe: Callable[[], dict[str, Any]]) -> None:
        self.path = os.path.join(directory, SOCKET_NAME)
        self._describe = describe
        self._listener: socket.socket | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Without it (a file system that has no sockets, say) the job runs all the same."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # A socket's path is at most 107 bytes; by descriptor its length does not matter.
        directory_fd = os.open(os.path.dirname(self.path), os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}")
            os.chmod(self.path, 0o600)
            listener.listen(8)
        except OSError:
            listener.close()
            return
        finally:
            os.close(directory_fd)
        self._listener = listener
        loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        with client:
            client.setblocking(False)
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            uid = struct.unpack("3i", credentials)[1]
            if uid not in (0, os.getuid()):
                return
            try:
                client.send(msgspec.json.encode(self._describe()) + b"\n")
            except OSError:
                pass  # gone, or not reading: its own affair

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            try:
                os.unlink(self.path)
            except OSError:
                pass
