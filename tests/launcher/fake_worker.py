"""A decorated script without torch: speaks the worker's side of the wire, and does as files say.

In its directory: `finish` ends the train function; `raise-N` makes rank N raise (its text is the
class of the error); `hang-N` makes rank N stand still, heedless of aborts. It prints what it is
told. It commits LAST_STEP steps and then goes on without, so that all ranks come to the same one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

from resilient import wire
from resilient.core.model import ErrorInfo, Holding
from resilient.page import Activity, Page

LAST_STEP = 10
ranks_at_start = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "MASTER_PORT")}
socket_fd, page_fd = map(int, os.environ.pop("RESILIENT_WORKER_FDS").split(","))
channel, page = socket.socket(fileno=socket_fd), Page(page_fd)


def tell(message: wire.Message) -> None:
    channel.send(wire.encode(message))


def show(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def report(kind: type[wire.Interrupted] | type[wire.Finished], generation: int, step: int) -> None:
    tell(kind(generation=generation, step=step, holdings=(Holding(step),)))


def run(start: wire.Start, fds: list[int]) -> None:
    """One generation: until it finishes, raises or is aborted."""
    before = Page(fds[0]).kept(start.cut.step) if fds else None
    show(
        start=start.generation, rank=start.rank, pid=os.getpid(), step=start.cut.step,
        drills=start.drills, before=before and before.decode(), environment=start.environment,
    )  # fmt: skip
    page.enter(start.generation)
    tell(wire.Joined(start.generation))
    step = start.cut.step
    page.set_step(step)
    tell(wire.Restored(start.generation))
    page.act(Activity.TRAINING)
    stepped = False
    while True:
        if os.path.exists("finish"):
            report(wire.Finished, start.generation, step)
            return
        if os.path.exists(f"raise-{start.rank}"):
            with open(f"raise-{start.rank}") as file:
                error = ErrorInfo(file.read(), "script.py:1 in f", "a traceback\n")
            tell(wire.Failed(start.generation, step, error, False, (Holding(step),)))
            return
        if os.path.exists(f"hang-{start.rank}"):
            os.unlink(f"hang-{start.rank}")
            while True:
                time.sleep(0.01)
        if select.select([channel], [], [], 0.02)[0]:
            message = wire.decode_from_agent(channel.recv(200_000))
            show(told=type(message).__name__, rank=start.rank)
            if isinstance(message, wire.Abort):
                report(wire.Interrupted, start.generation, step)
                return
        page.progress()
        if step == LAST_STEP:
            continue
        step += 1
        page.keep(step, f"state of rank {start.rank}".encode())
        page.commit(step)
        if not stepped:
            tell(wire.Stepped(start.generation, step))
            stepped = True


signal.signal(signal.SIGTERM, lambda signum, frame: tell(wire.DrainRequest(signum)))
show(up=os.getpid(), **ranks_at_start)
tell(wire.Ready())
while True:
    data, fds, _, _ = socket.recv_fds(channel, 200_000, 4)
    message = wire.decode_from_agent(data)
    if isinstance(message, wire.Start):
        run(message, fds)
        continue
    show(told=type(message).__name__)
    if isinstance(message, wire.Persist):
        tell(wire.Persisted(message.step))
    elif isinstance(message, wire.Close):
        sys.exit(0)
    elif isinstance(message, wire.Stop):
        sys.exit(message.exit_code)
