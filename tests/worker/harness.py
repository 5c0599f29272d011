"""A small agent for tests: real worker processes, real sockets, pages and TCPStores, no decisions.

Workers are forked from a process that has torch imported, as the launcher's zygote does, and run a
script of the test. The test plays the coordinator: it starts and aborts generations and looks at
the messages that come back, each with the time at which it came.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient import wire
from resilient.core.model import Cut, CutKind
from resilient.page import Page
from resilient.resolver import without_name_servers

WAIT_S = 30.0
IMPORT_S = 100.0
STACKS_SIGNAL = signal.SIGRTMIN + 4
BEGINNING = Cut(CutKind.INITIAL, 0)


def memory(step: int, *holders: int) -> Cut:
    return Cut(CutKind.MEMORY, step, holders)


@dataclass
class Worker:
    """One worker process as the test sees it. messages: (monotonic seconds, message)."""

    pid: int  # 0 until it is forked
    socket: socket.socket
    page: Page
    log: Path
    messages: list[tuple[float, Any]] = field(default_factory=list)
    status: int | None = None  # exit code, or minus the signal
    rank: int = -1
    generation: int = -1

    def of(self, kind: type, generation: int | None = None) -> list[Any]:
        return [
            message
            for _, message in self.messages
            if isinstance(message, kind)
            and (generation is None or getattr(message, "generation", None) == generation)
        ]

    def time_of(self, kind: type, generation: int) -> float:
        return next(
            at
            for at, message in self.messages
            if isinstance(message, kind) and message.generation == generation
        )

    def told(self) -> str:
        """What it said, for a message of a failed test."""
        said = [type(message).__name__ for _, message in self.messages[-8:]]
        return f"pid {self.pid} rank {self.rank} status {self.status} said {said}"


class Zygote:
    """A process with torch imported that forks workers; one serves many tests."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self.socket.settimeout(IMPORT_S)  # on a busy machine importing torch takes its time
        assert self.socket.recv(16) == b"ready", "the zygote ended while it imported torch"
        self.socket.settimeout(None)

    def fork(self, script: Path, environment: dict[str, str], fds: list[int]) -> None:
        request = {"script": str(script), "environment": environment}
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """It ends, and what is left of its children with it."""
        self.socket.close()
        self._process.wait(10)


class Agent:
    """Starts workers, tells them things, and collects what they say. A context manager."""

    def __init__(self, directory: Path, zygote: Zygote) -> None:
        self.directory = directory
        self.workers: list[Worker] = []
        self.stores: dict[int, Any] = {}
        self._zygote = zygote

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.status is None and worker.pid:
                self.kill(worker)
        for worker in self.workers:
            worker.socket.close()
            worker.page.close()
        self.stores.clear()

    # ------------------------------------------------------------ doing

    def launch(self, script: Path, count: int = 1, **environment: str) -> list[Worker]:
        """Starts workers that run the script, and waits until they are at the decorator."""
        started = [self._launch(script, environment) for _ in range(count)]
        for worker in started:
            self.wait(lambda worker=worker: worker.of(wire.Ready), f"ready: {worker.told()}")
        return started

    def _launch(self, script: Path, environment: dict[str, str]) -> Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = Page.create()
        log = self.directory / f"worker-{len(self.workers)}.log"
        with open(log, "wb") as output:
            self._zygote.fork(script, environment, [theirs.fileno(), page.fd, output.fileno()])
        theirs.close()
        worker = Worker(0, ours, page, log)
        self.workers.append(worker)
        self.wait(lambda: worker.pid > 0, "a forked worker")
        return worker

    def start(
        self,
        generation: int,
        ranks: Sequence[Worker],
        cut: Cut = BEGINNING,
        drills: Sequence[str] = (),
        predecessors: dict[int, Page] | None = None,
    ) -> None:
        """Starts the generation; ranks: workers in rank order."""
        import torch.distributed as dist

        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        port = listener.getsockname()[1]
        with without_name_servers():
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self.stores[generation] = store
        for rank, worker in enumerate(ranks):
            worker.rank, worker.generation = rank, generation
            predecessor = (predecessors or {}).get(rank)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(ranks)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
            start = wire.Start(
                generation,
                rank,
                rank,
                len(ranks),
                "127.0.0.1",
                store.port,
                cut,
                environment,
                drills=tuple(drills),
            )
            fds = [predecessor.fd] if predecessor is not None else []
            socket.send_fds(worker.socket, [wire.encode(start)], fds)

    def tell(self, message: wire.Message, *workers: Worker) -> None:
        for worker in workers or self.alive:
            worker.socket.send(wire.encode(message))

    def abort(self, generation: int, *workers: Worker) -> float:
        """Tells living members to leave the generation; returns when."""
        now = time.monotonic()
        self.tell(wire.Abort(generation, "the test says so"), *workers)
        return now

    def kill(self, worker: Worker, signum: int = signal.SIGKILL) -> None:
        self._signal(worker, signum)
        if signum == signal.SIGKILL:
            self.wait(lambda: worker.status is not None, f"the end of {worker.told()}")

    def close(self) -> None:
        """Tells all that the job is done, and expects that they end with 0."""
        self.tell(wire.Close())
        self.wait(lambda: not self.alive, "every worker's end")
        for worker in self.workers:
            if worker.status not in (0, -signal.SIGKILL):
                raise AssertionError(f"{worker.told()}\n{worker.log.read_text()}")

    @staticmethod
    def _signal(worker: Worker, signum: int) -> None:
        if worker.pid <= 1:  # not forked yet; kill(-1) would mean everybody
            return
        try:
            os.kill(worker.pid, signum)
        except ProcessLookupError:
            pass

    # ------------------------------------------------------------ seeing

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.status is None]

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
        """Takes in messages until the condition holds; fails when it does not in time."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self._evidence()}")
            self._take_in(min(left_s, 0.2))

    def _evidence(self) -> str:
        """What each worker said, the end of its log, and its stacks."""
        for worker in self.alive:
            self._signal(worker, STACKS_SIGNAL)
        time.sleep(0.5)
        told = [worker.told() for worker in self.workers]
        for worker in self.workers:
            lines = worker.log.read_text().splitlines()
            told += [line for line in lines if not line.startswith("frame #")][-60:]
        return "\n".join(told)

    def wait_all(self, kind: type, generation: int, ranks: Sequence[Worker]) -> list[Any]:
        """Waits until each has said it about that generation; returns what was said."""
        self.wait(
            lambda: all(worker.of(kind, generation) for worker in ranks),
            f"{kind.__name__} of generation {generation}",
        )
        return [worker.of(kind, generation)[0] for worker in ranks]

    def _take_in(self, timeout_s: float) -> None:
        by_fd = {worker.socket.fileno(): worker for worker in self.alive}
        fds = [self._zygote.socket.fileno(), *by_fd]
        ready, _, _ = select.select(fds, [], [], timeout_s)
        now = time.monotonic()
        for fd in ready:
            if fd == self._zygote.socket.fileno():
                self._from_zygote()
                continue
            worker = by_fd[fd]
            try:
                data = worker.socket.recv(256 * 1024)
            except ConnectionError:
                data = b""
            if data:
                worker.messages.append((now, wire.decode_from_worker(data)))
            else:  # its exit comes from the zygote
                time.sleep(0.001)

    def _from_zygote(self) -> None:
        message = json.loads(self._zygote.socket.recv(4096))
        if "pid" in message:
            next(worker for worker in self.workers if not worker.pid).pid = message["pid"]
        else:
            worker = next(w for w in self.workers if w.pid == message["exited"])
            worker.status = message["status"]


# ---------------------------------------------------------------- the zygote's side


def _zygote(socket_fd: int) -> None:
    import torch
    import torch._dynamo

    import resilient.worker.train  # noqa: F401  # what workers should not have to import

    torch.set_num_threads(1)
    assert threading.active_count() == 1
    link = socket.socket(fileno=socket_fd)
    link.send(b"ready")
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([link], [], [], 0.01)
        if ready:
            data, fds, _, _ = socket.recv_fds(link, 65536, 3)
            if not data:
                break
            pid = os.fork()
            if pid == 0:
                link.close()
                _become_worker(json.loads(data), *fds)
            for fd in fds:
                os.close(fd)
            children.add(pid)
            link.send(json.dumps({"pid": pid}).encode())
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                link.send(json.dumps({"exited": pid, "status": code}).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _become_worker(request: dict[str, Any], socket_fd: int, page_fd: int, output_fd: int) -> None:
    for fd in (1, 2):
        os.dup2(output_fd, fd)
    os.environ.update(request["environment"])
    os.environ["RESILIENT_WORKER_FDS"] = f"{socket_fd},{page_fd}"
    faulthandler.register(STACKS_SIGNAL)
    code = 1
    try:
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _zygote(int(sys.argv[1]))
