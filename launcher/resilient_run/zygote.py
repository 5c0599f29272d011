"""The process that workers are forked from: single-threaded, torch imported, and nothing else.

The one idea: a fork of a process that has imported torch takes milliseconds where a fresh
interpreter takes seconds, but only a process without threads may be forked. So the zygote is forked
from the agent before that starts any thread, imports, checks that it still has one thread, and from
then on only waits: for requests, for the end of its children, and for the end of the agent.

It also owns the job's temporary directory (scratch.py), since it outlives the agent by a moment and
every worker too.

It is the parent of every worker: it reaps them and reports their exit status, and before it reaps
one it kills what that worker's process group left behind (the group's number cannot be given to
anybody else until then). Workers die with it (PR_SET_PDEATHSIG). When the agent is gone, however
that came about, it kills every worker's group and ends.

In a new worker `serve` returns: the script then runs near the bottom of the stack, and the
interpreter ends as it always does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

import msgspec

from resilient.errors import ConfigError
from resilient_run import scratch
from resilient_run.hugepages import collapse_heap

DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "resilient.worker.train")
MAX_DATAGRAM_BYTES = 200_000
_PR_SET_PDEATHSIG = 1
_SPAWNED = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0);"
    "from resilient_run.bootstrap import run_spawned; run_spawned()"
)

_HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Launch(msgspec.Struct, frozen=True):
    """What every worker runs.

    Attributes:
        kind: "script", "module" (as `python -m`) or "command" (--no-python).
        start_method: "fork", or "spawn": a fresh interpreter. A command is always executed.
        python: interpreter for "spawn".
        preload: modules of the user's to import before forking.
        numa_binding: torchrun's --numa-binding, "" without one.
        scratch: the job's temporary directory, made by the zygote; "": none.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    start_method: str = "fork"
    python: str = sys.executable
    preload: tuple[str, ...] = ()
    numa_binding: str = ""
    scratch: str = ""

    @property
    def forks(self) -> bool:
        return self.start_method == "fork" and self.kind != "command"


# ---------------------------------------------------------------- agent -> zygote


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. Attached: its socket, its page and its stacks file, unless a command.

    Attributes:
        environment: on top of the zygote's own; None unsets.
        stdout, stderr: files to append to; "" is the agent's own stream.
        local_rank: None for a spare.
    """

    number: int
    environment: dict[str, Union[str, None]]
    stdout: str = ""
    stderr: str = ""
    local_rank: Union[int, None] = None


class SignalGroup(msgspec.Struct, frozen=True, tag=True):
    """Send it to the worker's process group (here nobody can have reaped it meanwhile)."""

    number: int
    signum: int


class SweepAlways(msgspec.Struct, frozen=True, tag=True):
    """The script is decorated: what a worker leaves behind is killed even after exit code 0."""


# ---------------------------------------------------------------- zygote -> agent


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Imports are done. error: why no worker can be started (then the zygote has ended)."""

    error: str = ""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Attached: the pidfd."""

    number: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    number: int
    error: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Reaped. status: exit code, or minus the signal number."""

    number: int
    status: int


Request = Union[Fork, SignalGroup, SweepAlways]
Reply = Union[Warm, Forked, Refused, Exited]
encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Has the kernel send signum to this process when the thread that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def first_path(launch: Launch) -> str:
    """What Python itself would put first on sys.path for this script or module."""
    if launch.kind == "module":
        return os.getcwd()
    target = os.path.realpath(launch.target)
    return target if os.path.isdir(target) else os.path.dirname(target)


def set_first_path(launch: Launch) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first_path(launch)


@dataclass(frozen=True)
class Child:
    """What a new worker knows of itself; its fds are -1 where it has none."""

    request: Fork
    socket_fd: int = -1
    page_fd: int = -1
    stacks_fd: int = -1


def start(launch: Launch) -> tuple[int, socket.socket] | Child:
    """Forks the zygote.

    Returns:
        In the agent, its pid and the channel to it; in every worker ever forked from it, a Child.
        In the zygote itself it does not return.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_pid = os.getpid()
    _flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    code = 1
    try:
        die_with_parent(agent_pid)
        zygote = _Zygote(theirs, launch, agent_pid)
        child = zygote.serve() if zygote.warm_up() else None
        if child is not None:
            return child
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


class _Zygote:
    def __init__(self, channel: socket.socket, launch: Launch, agent_pid: int) -> None:
        self.channel = channel
        self.launch = launch
        self.agent_pid = agent_pid
        self.pid = os.getpid()
        self.sweep_always = False
        self.pids: dict[int, int] = {}  # number -> pid
        self.pidfds: dict[int, int] = {}
        # The terminal, or a scheduler, may signal every process of the job: only the agent answers.
        # Workers get back what the agent was started with (nohup's ignored SIGHUP, for one).
        self.dispositions = {s: signal.getsignal(s) for s in _HANDLED}
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_IGN)

    # ------------------------------------------------------------ before the first worker

    def warm_up(self) -> bool:
        """Imports; tells the agent the outcome. False: no worker can be forked from here."""
        gc.disable()
        try:
            if self.launch.forks:
                self._import_all()
        except ConfigError as error:
            self.channel.send(encode(Warm(error=str(error))))
            return False
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # else the first collection in each worker copies every page it inherited
        if self.launch.forks:
            collapse_heap()
        try:
            self.channel.send(encode(Warm()))
        except OSError:
            return False  # the agent has been told to stop meanwhile
        return True

    def _import_all(self) -> None:
        if self.launch.preload:
            set_first_path(self.launch)
        before = os.environ.get("OPENBLAS_NUM_THREADS")
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        try:
            for name in DEFAULT_PRELOAD:
                importlib.import_module(name)
            for name in self.launch.preload:
                try:
                    importlib.import_module(name)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    raise ConfigError(f"--preload {name}: cannot be imported ({what})") from None
                if num_threads() != 1:
                    raise ConfigError(
                        f"--preload {name}: importing it starts threads, and a process with "
                        "threads cannot be forked safely; leave it out or use --start-method spawn"
                    )
        finally:
            if before is None:
                del os.environ["OPENBLAS_NUM_THREADS"]
            else:
                os.environ["OPENBLAS_NUM_THREADS"] = before
        if num_threads() != 1:
            raise ConfigError("importing torch starts threads here; use --start-method spawn")

    # ------------------------------------------------------------ loop

    def serve(self) -> Child | None:
        """Answers requests until the agent is gone (None); in a new worker, returns its Child."""
        # From here on the agent's end is ours to see, so that whole groups can be killed and not
        # only the processes that have asked the kernel to die with us.
        agent_pidfd = os.pidfd_open(self.agent_pid)
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
        if os.getppid() != self.agent_pid:
            return None
        scratch.make(self.launch.scratch)
        self.selector = selectors.DefaultSelector()
        self.selector.register(agent_pidfd, selectors.EVENT_READ, "agent")
        self.selector.register(self.channel, selectors.EVENT_READ, "channel")
        while True:
            for key, _ in self.selector.select():
                if key.data == "agent":
                    self._end()
                    return None
                if key.data == "channel":
                    data, fds, _, _ = socket.recv_fds(self.channel, MAX_DATAGRAM_BYTES, 8)
                    if not data:
                        self._end()
                        return None
                    child = self._obey(decode_request(data), fds)
                    if child is not None:
                        os.close(agent_pidfd)
                        return child
                else:
                    self._reap(key.data)

    def _obey(self, request: Request, fds: list[int]) -> Child | None:
        if isinstance(request, SweepAlways):
            self.sweep_always = True
        elif isinstance(request, SignalGroup):
            if request.number in self.pids:
                _kill_group(self.pids[request.number], request.signum)
        else:
            return self._fork(request, fds)
        return None

    def _fork(self, request: Fork, fds: list[int]) -> Child | None:
        # A signal for the group must not arrive while the child still ignores it as we do.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(Refused(request.number, str(error)))
            pid = -1
        if pid == 0:
            return self._become_worker(request, fds, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            pidfd = os.pidfd_open(pid)
            self.pids[request.number], self.pidfds[request.number] = pid, pidfd
            self.selector.register(pidfd, selectors.EVENT_READ, request.number)
            self._tell(Forked(request.number, pid), [pidfd])
        return None

    def _tell(self, reply: Reply, fds: Iterable[int] = ()) -> None:
        try:
            socket.send_fds(self.channel, [encode(reply)], fds)
        except ConnectionError:
            pass  # the agent is gone, which `serve` is about to see: it ends everything in order

    def _reap(self, number: int) -> None:
        pid, pidfd = self.pids.pop(number), self.pidfds.pop(number)
        self.selector.unregister(pidfd)
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        clean = info is not None and info.si_code == os.CLD_EXITED and info.si_status == 0
        if self.sweep_always or not clean:
            _kill_group(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        self._tell(Exited(number, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        for pid in self.pids.values():
            _kill_group(pid, signal.SIGKILL)
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        scratch.remove(self.launch.scratch)

    # ------------------------------------------------------------ in the new worker

    def _become_worker(self, request: Fork, fds: list[int], mask: Iterable[int]) -> Child:
        try:
            die_with_parent(self.pid)
            os.setsid()
            for stream_fd, path in ((1, request.stdout), (2, request.stderr)):
                if path:
                    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                    os.dup2(fd, stream_fd)
                    os.close(fd)
            self.selector.close()
            self.channel.close()
            for fd in self.pidfds.values():
                os.close(fd)
            for signum, disposition in self.dispositions.items():
                signal.signal(signum, disposition)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name, value in request.environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            child = Child(request, *fds)
            if fds:
                path = scratch.of_worker(self.launch.scratch, request.number)
                os.environ[scratch.VARIABLE] = path
                os.environ["RESILIENT_WORKER_FDS"] = f"{child.socket_fd},{child.page_fd}"
                os.environ["RESILIENT_STACKS_FD"] = str(child.stacks_fd)
            if not self.launch.forks:
                self._execute(child)
            return child
        except BaseException as error:
            os.write(2, f"resilient-run: a worker could not be started: {error}\n".encode())
            os._exit(126)

    def _execute(self, child: Child) -> None:
        """Replaces this process by the command, or by a fresh interpreter."""
        launch = self.launch
        arguments = list(launch.arguments)
        if launch.kind == "command":
            os.execvp(launch.target, [launch.target, *arguments])
        for fd in (child.socket_fd, child.page_fd, child.stacks_fd):
            os.set_inheritable(fd, True)
        head = [launch.python, "-u", "-c", _SPAWNED]
        tail = [launch.kind, launch.numa_binding, launch.target, *arguments]
        os.execvp(launch.python, head + tail)


def _kill_group(pid: int, signum: int) -> None:
    assert pid > 1, pid  # 0 and 1 would reach our own group, -1 everybody
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        # Not its own group yet: it has not come to setsid. Or it is another user's by now (sudo).
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
