"""A worker as the agent sees it, and the agent's end of the channel to the zygote.

The one idea: everything here is a handle that stays valid when the process behind it is gone.
Signals go by pidfd, so they can never reach a stranger; the progress page outlives the process; and
that a process has ended is known from the zygote, its parent, not from a closed socket, which a
forked data-loader child may hold open.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from resilient import wire
from resilient.core.model import Slot, Worker
from resilient.page import Page
from resilient_run import zygote as zg
from resilient_run.logs import WorkerLogs

SEND_TIMEOUT_S = 5.0


@dataclass
class WorkerProcess:
    """One worker, from the request to fork it until it is reaped.

    Attributes:
        slot: None for a spare.
        pid, pidfd: None until the zygote has answered.
        ready: it has reached the decorator.
        observed: it answers to the stacks signal (a command does not).
        is_silent: its end of the socket is closed (a command never had one): nothing comes.
    """

    worker: Worker
    slot: Slot | None
    page: Page
    logs: WorkerLogs
    socket: socket.socket
    pid: int | None = None
    pidfd: int | None = None
    ready: bool = False
    observed: bool = True
    is_silent: bool = False

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> bool:
        """False when the worker is gone, or has not read for so long that its socket is full."""
        try:
            socket.send_fds(self.socket, [wire.encode(message)], fds)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return False
        return True

    def receive(self) -> wire.FromWorker | None:
        """The next message; None when there is none now or ever again.

        Raises:
            WireError: it sent something else.
        """
        try:
            data = self.socket.recv(zg.MAX_DATAGRAM_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return None
        if not data:
            self.is_silent = True
            return None
        return wire.decode_from_worker(data)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """To this process alone; the zygote kills what it leaves behind."""
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd, signum)
            except ProcessLookupError:
                pass

    def kill_group(self) -> None:
        """When there is no zygote to do it: the worker died with it, what it started did not."""
        if self.pid is not None:
            assert self.pid > 1, self.pid
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def close(self) -> None:
        """After it was reaped. The page stays: a successor may need what is in it."""
        self.socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ZygoteChannel:
    """The agent's end: requests out, replies in. Nothing here blocks but a burst of requests.

    Every method that sends raises ConnectionError when the zygote is gone, or takes nothing for
    SEND_TIMEOUT_S.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        assert pid > 1, pid
        self.pid = pid
        self.socket = channel
        channel.setblocking(False)

    def fork(
        self,
        worker: Worker,
        slot: Slot | None,
        environment: Mapping[str, str | None],
        logs: WorkerLogs,
        *,
        attach: bool,
    ) -> WorkerProcess:
        """Asks for a worker; Forked, and one day Exited, will name its number.

        Args:
            attach: give it its socket, page and stacks file (not to a command).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        page = Page.create(f"worker-{worker.number}")
        local_rank = None if slot is None else slot.local_rank
        request = zg.Fork(worker.number, dict(environment), logs.stdout, logs.stderr, local_rank)
        stacks_fd = os.open(logs.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._send(request, [theirs.fileno(), page.fd, stacks_fd] if attach else [])
        finally:
            theirs.close()
            os.close(stacks_fd)
        return WorkerProcess(worker, slot, page, logs, ours, observed=attach)

    def signal_group(self, number: int, signum: int) -> None:
        self._send(zg.SignalGroup(number, signum))

    def sweep_always(self) -> None:
        self._send(zg.SweepAlways())

    def _send(self, request: zg.Request, fds: list[int] | None = None) -> None:
        data = zg.encode(request)
        try:
            try:
                socket.send_fds(self.socket, [data], fds or [])
            except BlockingIOError:  # many workers at once: it takes one out in about 10 ms
                room = select.poll()
                room.register(self.socket, select.POLLOUT)
                room.poll(1000 * SEND_TIMEOUT_S)
                socket.send_fds(self.socket, [data], fds or [])
        except OSError as error:
            raise ConnectionError(f"the zygote does not listen: {error}") from error

    def receive(self) -> tuple[zg.Reply, list[int]] | None:
        """The next reply and its fds; None when there is none now.

        Raises:
            ConnectionError: the zygote is gone.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, zg.MAX_DATAGRAM_BYTES, 4)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("the zygote has ended")
        return zg.decode_reply(data), fds

    def close(self) -> int:
        """Ends the zygote, and with it every worker, and waits for it. Returns its exit status.

        It closes within a moment, or is killed: it has nothing to lose.
        """
        self.socket.close()
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(5000):
                os.kill(self.pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
