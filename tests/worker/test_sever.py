"""A thread blocked in a collective, or in making groups, comes out; nothing else is touched.

The peer that blocks the others is always a stopped process: its sockets stay open, so nothing but
severing can end the wait (gloo's own timeout here is 30 minutes).
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from resilient import wire
from resilient.worker import sever
from tests.worker.harness import Agent, Worker, Zygote

OUT_S = 3.0

WORKER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from resilient import wire
from resilient.worker import groups
from resilient.worker.link import AgentLink

link = AgentLink.from_environment()
link.open()
link.send(wire.Ready())
start, _ = link.next_order()
mode = os.environ["MODE"]

def join():
    store = groups.connect(start.store_host, start.store_port, lambda: None)
    groups.join(store, start.rank, start.world_size, torch.device("cpu"))

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

class StoppingStore(dist.Store):
    '''Stops this process once it has published its address: the others wait for its connection.'''
    def __init__(self, store):
        super().__init__()
        self.store, self.published = store, False
    def set(self, key, value):
        self.store.set(key, value)
        self.published = True
    def get(self, key):
        if self.published:
            stop()
        return self.store.get(key)
    def wait(self, keys, timeout=None):
        if self.published:
            stop()
        self.store.wait(keys)
    def add(self, key, number):
        return self.store.add(key, number)
    def set_timeout(self, timeout):
        pass

link.enter(start.generation, (start.store_host, start.store_port), start.world_size)
where = "joining"
try:
    if start.rank == 2 and mode == "store":
        stop()
    if start.rank == 2 and mode == "connect":
        store = StoppingStore(dist.TCPStore(start.store_host, start.store_port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=2, world_size=4)
    join()
    link.send(wire.Joined(0))
    where = "new group"
    if mode == "new group":
        if start.rank == 2:
            stop()
        group = dist.new_group([0, 1, 2, 3])
    where = "collective"
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))
    if start.rank == 2:
        stop()
    link.send(wire.Stepped(0, 5))
    while True:
        dist.all_reduce(torch.ones(1000))
except RuntimeError as error:
    seen = link.wait_abort(0, 0.0)
    link.send(wire.Persisted(0 if seen else 1, where))
    groups.leave()
    link.leave()
start, _ = link.next_order()  # the same process makes the next generation's groups
link.enter(start.generation, (start.store_host, start.store_port), start.world_size)
join()
total = torch.ones(1)
dist.all_reduce(total)
link.send(wire.Stepped(1, int(total)))
groups.leave()
link.next_order()
"""


def is_stopped(worker: Worker) -> bool:
    status = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2]
    return status.split()[0] == "T"


@pytest.mark.parametrize("mode", ["collective", "store", "connect", "new group"])
def test_blocked_threads_come_out_and_form_a_new_world(
    tmp_path: Path, zygote: Zygote, mode: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    with Agent(tmp_path, zygote) as agent:
        workers = agent.launch(script, 4, MODE=mode)
        others = [workers[0], workers[1], workers[3]]
        agent.start(0, workers)
        agent.wait(lambda: is_stopped(workers[2]), "rank 2 to stop itself")
        if mode == "collective":
            agent.wait_all(wire.Stepped, 0, others)
        agent.wait(lambda: all(is_waiting(worker) for worker in others), "the others to block")
        told_s = agent.abort(0, *others)
        agent.wait(lambda: all(w.of(wire.Persisted) for w in others), "the others to come out")
        for worker in others:
            out_s, answer = worker.messages[-1]
            assert answer.step == 0, "it came out before the abort: nothing was shown"
            assert out_s - told_s < OUT_S, (worker.told(), answer)
        agent.start(1, others)
        assert [said.step for said in agent.wait_all(wire.Stepped, 1, others)] == [3, 3, 3]
        agent.kill(workers[2])
        agent.close()


def is_waiting(worker: Worker) -> bool:
    """Its main thread has slept through a while, without using the CPU."""

    def used() -> list[str]:
        fields = Path(f"/proc/{worker.pid}/task/{worker.pid}/stat").read_text().rpartition(")")[2]
        return [fields.split()[0], *fields.split()[11:13]]

    before = used()
    time.sleep(0.05)
    return before[0] == "S" and used() == before


def test_the_sockets_of_the_user_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as peer:
            assert sever.Severed().sever_gloo(range(4)) == 0
            assert sever.sever_store("127.0.0.1", port + 1 if port < 65535 else 1) == 0
            client.sendall(b"x")
            assert peer.recv(1) == b"x"


def test_only_the_connection_to_the_store_is_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as peer:
            assert sever.sever_store("127.0.0.2", port) == 0
            assert sever.sever_store("127.0.0.1", port) == 1
            assert client.recv(1) == b""
            assert peer.recv(1) == b""
            listener.settimeout(5)
            with socket.create_connection(("127.0.0.1", port)):
                listener.accept()[0].close()  # the listening socket still accepts
