"""The TCPStores: one a generation, on a port of its own, hosted by the agent.

The one idea: no generation can read an address another one has left, and no worker's death takes a
store along. The next generation's store is opened ahead, so that a recovery does not wait for it.
Letting go of an old one closes its connections, which frees whatever is still blocked in it.

A store's server is a thread: the zygote must have been forked before.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

from resilient.errors import ConfigError
from resilient.resolver import without_name_servers


class Stores:
    """Stores by generation.

    Args:
        host: what workers are told to connect to.
        first_port: for the first store (--master-port); 0: any free one.
    """

    def __init__(self, host: str, first_port: int = 0) -> None:
        self._host = host
        self._first_port = first_port
        self._stores: dict[int, Any] = {}

    def open(self, generation: int) -> tuple[str, int]:
        """Opens the store of a generation and returns (host, port).

        Raises:
            ConfigError: the port that was asked for is in use.
        """
        from torch.distributed import TCPStore

        port, self._first_port = self._first_port, 0
        try:
            # A listening socket of our own: on this address alone, and IPv4, so that torch does not
            # ask a name server who its peers are (see resilient.resolver).
            listening = socket.create_server((self._host, port), backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} cannot be used ({error.strerror}): give another one, or none"
                if port
                else f"no port can be opened on {self._host}: {error.strerror}"
            ) from None
        with without_name_servers():
            store = TCPStore(
                self._host,
                listening.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=listening.detach(),
            )
        self._stores[generation] = store
        return self._host, store.port

    def close_before(self, generation: int) -> None:
        """Lets go of the stores of older generations."""
        for old in [g for g in self._stores if g < generation]:
            # Its end joins the server's thread: not in the event loop.
            store = self._stores.pop(old)
            thread = threading.Thread(target=_let_go, args=([store],), daemon=True)
            del store
            thread.start()


def _let_go(only_reference: list[Any]) -> None:
    only_reference.clear()
