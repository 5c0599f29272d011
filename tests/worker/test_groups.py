"""Groups of a generation: what is left of an old one is unusable, and not taken for a new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resilient.errors import StaleGeneration
from resilient.resolver import _state_of_thread, without_name_servers
from resilient.worker import groups, sever

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    groups.leave()


def test_an_old_mesh_is_refused_and_unequal_to_a_new_one() -> None:
    groups.join_alone(CPU)
    old = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sub = old["dp"]
    tensor = distribute_tensor(torch.arange(4.0), old, [Shard(0)])
    assert torch.equal((tensor + 1).full_tensor(), torch.arange(4.0) + 1)  # fills torch's caches
    groups.leave()
    groups.join_alone(CPU)
    new = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    again = distribute_tensor(torch.arange(4.0), new, [Shard(0)])
    assert torch.equal((again + 1).full_tensor(), torch.arange(4.0) + 1)
    assert old != new and new != old
    assert torch.equal(tensor.to_local(), torch.arange(4.0))
    for use in (
        lambda: old.size(),
        lambda: old["dp"],
        lambda: sub.get_group(),
        lambda: old.get_rank(),
        tensor.full_tensor,
    ):
        with pytest.raises(StaleGeneration, match="generation that has ended"):
            use()


def test_leaving_twice_and_without_a_group_is_harmless() -> None:
    groups.leave()
    groups.join_alone(CPU)
    dist.new_group([0])
    groups.leave()
    groups.leave()
    assert not dist.is_initialized()


def test_an_interrupted_join_leaves_nothing_behind() -> None:
    """Group names are part of the store's keys: a count that went on would part the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = groups.connect("127.0.0.1", server.port, lambda: None)
    num_severed = []

    def sever_when_it_waits() -> None:
        deadline_s = time.monotonic() + 20
        while not server.check(["0//cpu//0/0"]) and time.monotonic() < deadline_s:
            time.sleep(0.001)  # not yet: it has not published its address to rank 1
        num_severed.append(sever.sever_store("127.0.0.1", server.port))

    thread = threading.Thread(target=sever_when_it_waits)
    thread.start()
    with pytest.raises(RuntimeError):
        groups.join(store, 0, 2, CPU)
    thread.join()
    assert num_severed == [2]  # the server's own client is the other one
    groups.leave()
    assert dist.distributed_c10d._world.group_count == 0
    assert not dist.distributed_c10d._world.pg_names


def test_the_resolver_is_what_it_was_afterwards() -> None:
    state = _state_of_thread()
    if state is None:
        pytest.skip("not glibc")
    before = state.retrans, state.retry, state.nscount
    with without_name_servers():
        assert state.nscount == 0
    assert (state.retrans, state.retry, state.nscount) == before
