"""Runs `resilient-run` from a process that has torch imported: 0.3 s a start instead of 5.

The same code runs as with the command, in a process of its own, which ends as an interpreter ends;
only the imports are there before. One JSON request a datagram, with the new process's stdout and
stderr as descriptors; the answers are its pid, and later its exit status.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import tempfile


def serve(channel: socket.socket) -> list[str] | None:
    """Returns the arguments in a process that is to run them, None when nobody asks any more."""
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    pids: dict[int, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                selector.unregister(key.fd)
                _, status = os.waitpid(pids[key.fd], 0)
                answer = {"pid": pids.pop(key.fd), "status": os.waitstatus_to_exitcode(status)}
                os.close(key.fd)
                channel.send(json.dumps(answer).encode())
                continue
            data, fds, _, _ = socket.recv_fds(channel, 100_000, 4)
            if not data:
                return None
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                selector.close()
                channel.close()
                for other in pids:
                    os.close(other)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number + 1)
                    os.close(fd)
                os.setsid()
                os.chdir(request["cwd"])
                os.environ.update(request["env"])
                tempfile.tempdir = None  # torch has asked for it, with our environment
                return list(request["argv"])
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            pids[pidfd] = pid
            selector.register(pidfd, selectors.EVENT_READ)
            channel.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    import resilient_run.agent  # noqa: F401
    from resilient_run.cli import main

    del os.environ["OPENBLAS_NUM_THREADS"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main(arguments))
