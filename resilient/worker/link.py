"""The worker's end of its connection to the agent, and the thread that ends waits.

One idea: the training thread may be blocked anywhere, so it never reads the socket. A control
thread does. Orders (enter this generation, close, stop, persist) are queued for the training
thread, which takes them when it waits at the decorator. An abort is carried out by the control
thread itself: it severs the generation's connections, again and again, until the training thread
has left.

Messages arrive in order, which decides every race: an abort that overtakes the training thread's
entry is found by it on entry, one for a generation it has left means nothing.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from resilient import wire
from resilient.page import Page
from resilient.worker import sever

FDS_VARIABLE = "RESILIENT_WORKER_FDS"
_SEVER_EVERY_S = 0.003
_KNOCK_AFTER = 5
"""Rounds of severing after which a thread that is still inside is taken to be in group creation."""
_KNOCKS_A_ROUND = 64
_PROVOKE_AFTER = 6
_PROVOKE_EVERY = 64
"""Rounds, likewise, for a thread that waits for an operation which gloo has lost."""
_AGENT_LOST_EXIT_CODE = 70
_RECEIVE_BYTES = 256 * 1024

Order = wire.Start | wire.Close | wire.Stop | wire.Persist | wire.Look


class AgentLink:
    """One a process. `page` is written by the training thread only."""

    def __init__(self, socket_fd: int, page_fd: int) -> None:
        for fd in (socket_fd, page_fd):
            os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=socket_fd)
        self._socket.setblocking(True)
        self.page = Page(page_fd)
        self._orders: queue.SimpleQueue[tuple[Order, Page | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._inside: int | None = None  # the generation whose connections may be severed
        self._store_host = ""
        self._store_port = 0
        self._world_size = 1
        self._severing = False
        self._num_rounds = 0
        self._severed = sever.Severed()
        self._aborted = -1  # newest generation an abort was seen for
        self._abort_seen = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_handlers: dict[int, Any] = {}

    @classmethod
    def from_environment(cls) -> AgentLink | None:
        """The link this process was started with; None without an agent."""
        value = os.environ.pop(FDS_VARIABLE, "")
        if not value:
            return None
        socket_fd, _, page_fd = value.partition(",")
        return cls(int(socket_fd), int(page_fd))

    def open(self) -> None:
        """Starts the control thread, and turns SIGTERM and SIGINT into requests to drain."""
        threading.Thread(target=self._control, name="resilient-control", daemon=True).start()
        self._take_signals()

    # ------------------------------------------------------------ the training thread

    def send(self, message: wire.Message) -> None:
        self._socket.send(wire.encode(message))

    def next_order(self) -> tuple[Order, Page | None]:
        """Waits for an order; a Start may bring the page of the rank's last process."""
        return self._orders.get()

    def enter(self, generation: int, store: tuple[str, int], world_size: int) -> None:
        """From now on an abort of this generation severs."""
        with self._lock:
            self._inside = generation
            self._store_host, self._store_port = store
            self._world_size = world_size
            self._severing = self._aborted >= generation
            self._num_rounds = 0
        self._abort_seen.clear()

    def is_aborted(self, generation: int) -> bool:
        return self._aborted >= generation

    def wait_abort(self, generation: int, timeout_s: float) -> bool:
        """Waits until an abort of the generation is seen; False when there was none in time."""
        if not self.is_aborted(generation):
            self._abort_seen.wait(timeout_s)
        return self.is_aborted(generation)

    def sever(self) -> None:
        """Severs by this worker's own decision, until `leave`; the first round at once."""
        with self._lock:
            self._severing = True
        self._sever_round()
        os.write(self._wake_write, b"\0")

    def leave(self) -> None:
        """The generation's groups are gone; nothing is severed any more."""
        with self._lock:
            self._inside = None
            self._severing = False

    def release(self) -> None:
        """Every rank has come out of its generation: what was severed may be closed."""
        self._severed.release()

    # ------------------------------------------------------------ signals

    def _take_signals(self) -> None:
        """Only where the script has not set a handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            if signal.getsignal(signum) == default:
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        if self._old_handlers:
            # A Python handler waits until the training thread is out of C++, which in a collective
            # may be never; the byte written here reaches the control thread at once.
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        wakeup_fd = signal.set_wakeup_fd(-1)
        if wakeup_fd != -1:
            signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        if wakeup_fd != self._wake_write:  # somebody else (asyncio) has taken the byte
            self._request_drain(signum)

    def restore_signals(self) -> None:
        for signum, handler in self._old_handlers.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, handler)
        if self._old_handlers:
            wakeup_fd = signal.set_wakeup_fd(-1)
            if wakeup_fd not in (-1, self._wake_write):
                signal.set_wakeup_fd(wakeup_fd)
        self._old_handlers = {}

    def _request_drain(self, signum: int) -> None:
        try:
            self.send(wire.DrainRequest(signum))
        except OSError:
            pass

    # ------------------------------------------------------------ the control thread

    def _control(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            timeout_ms = 1000 * _SEVER_EVERY_S if self._severing else None
            ready = {fd for fd, _ in poll.poll(timeout_ms)}
            if self._wake_read in ready:
                self._on_wake()
            if self._socket.fileno() in ready:
                self._receive()
            self._sever_round()

    def _on_wake(self) -> None:
        for signum in os.read(self._wake_read, 64):
            if signum in self._old_handlers:
                self._request_drain(signum)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            # Nobody is left who could tell us anything, or wants the result.
            print("resilient: the agent is gone, this worker ends", file=sys.stderr, flush=True)
            os._exit(_AGENT_LOST_EXIT_CODE)
        try:
            message = wire.decode_from_agent(data)
        except wire.WireError as error:
            # Without this thread no abort would be seen: better no worker than a deaf one.
            print(f"resilient: {error}; this worker ends", file=sys.stderr, flush=True)
            os._exit(_AGENT_LOST_EXIT_CODE)
        if isinstance(message, wire.Abort):
            self._on_abort(message)
            return
        page = None
        for fd in fds:
            os.set_inheritable(fd, False)
            page = Page(fd)
        self._orders.put((message, page))

    def _on_abort(self, abort: wire.Abort) -> None:
        with self._lock:
            self._aborted = max(self._aborted, abort.generation)
            if self._inside is not None and self._aborted >= self._inside:
                self._severing = True
        self._abort_seen.set()

    def _sever_round(self) -> None:
        # Under the lock: a round must not run into the making of the next generation's groups.
        with self._lock:
            if not self._severing or self._inside is None:
                return
            knocks = range(0)
            if self._num_rounds >= _KNOCK_AFTER:
                # Pair numbers go on counting when a device makes more groups, so walk upwards.
                first = (self._num_rounds - _KNOCK_AFTER) * _KNOCKS_A_ROUND
                first %= max(_KNOCKS_A_ROUND, 4 * self._world_size)
                knocks = range(first, first + min(_KNOCKS_A_ROUND, 4 * self._world_size))
            self._num_rounds += 1
            self._severed.sever_gloo(knocks)
            if self._num_rounds % _PROVOKE_EVERY == _PROVOKE_AFTER:
                self._severed.provoke()
            if self._store_port:
                sever.sever_store(self._store_host, self._store_port)
