"""The process groups of one generation: made over a store of its own, destroyed on the way out.

Each generation has its own TCPStore on a port of its own, so no key and no address of an older one
can ever be read, and no prefix is needed. Nothing here is specific to recovery but this: every wait
can be ended from another thread by `resilient.worker.sever`, and connecting to the store is retried
in short tries, since a connection in the making is the one thing that cannot be found and severed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from resilient.resolver import without_name_servers
from resilient.worker.mesh import poison_meshes, watch_meshes

_CONNECT_TRY_S = 5.0
_CONNECT_TIMEOUT_S = 60.0
_DESTROY_TIMEOUT_S = 2.0
_TIMEOUT = timedelta(minutes=30)
"""Only the last resort: the agent sees a hang long before, and severs."""


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this local rank, made current; the CPU where there is none."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and kind.type != "mps":  # no collectives there
            index = local_rank % torch.accelerator.device_count()
            torch.accelerator.set_device_index(index)
            return torch.device(kind.type, index)
    return torch.device("cpu")


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def connect(host: str, port: int, check: Callable[[], None]) -> dist.TCPStore:
    """The store of the generation.

    Args:
        check: called between tries to reach it; raises to give up.
    Raises:
        RuntimeError: not reached in time, or severed.
    """
    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            with without_name_servers():
                store = dist.TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=_CONNECT_TRY_S),
                )
        except (RuntimeError, ValueError):
            check()
            if time.monotonic() > deadline_s:
                raise
        else:
            store.set_timeout(_TIMEOUT)
            return store


def join(store: dist.Store, rank: int, world_size: int, device: torch.device) -> None:
    """Makes the default group of the generation.

    Raises:
        RuntimeError: as torch does, when a peer or the store is lost, or was severed.
    """
    watch_meshes()
    if device.type == "cuda":
        # The launcher's kind of environment says 1 here: an abort by hand would end the process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    _unstack_excepthook()
    dist.init_process_group(
        _backend(device), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    _hooks[1] = sys.excepthook


_hooks: list[Any] = [None, None]  # sys.excepthook before the last init_process_group, and after


def _unstack_excepthook() -> None:
    """Torch wraps sys.excepthook in a "[rank0]: " at each init: one is enough, of this rank."""
    if sys.excepthook is _hooks[1]:
        sys.excepthook = _hooks[0]
    _hooks[0] = sys.excepthook


def join_alone(device: torch.device) -> None:
    """A world of one, without any store outside this process."""
    watch_meshes()
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def join_from_environment(device: torch.device) -> None:
    """The world that another launcher describes in the environment."""
    watch_meshes()
    dist.init_process_group(_backend(device), init_method="env://")


def leave() -> None:
    """Destroys every group and poisons every mesh of this process. Harmless when done twice.

    The caller has severed the connections, or knows that nobody is blocked in one.
    """
    poison_meshes()
    doomed = list(distributed_c10d._world.pg_map)
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception:
            pass  # half-made or broken groups may refuse an orderly end
    _forget_groups()
    if doomed:
        # A group waits in its destructor for its threads; should one be stuck, we need not be.
        undertaker = threading.Thread(target=doomed.clear, name="resilient-undertaker", daemon=True)
        undertaker.start()
        undertaker.join(_DESTROY_TIMEOUT_S)


def _forget_groups() -> None:
    """Empties torch's own tables, whatever an interrupted init_process_group left there.

    Above all the counter that names groups: names are part of the keys in the store, and a rank
    that counts on would wait for ever for peers that began at 0.
    """
    world = distributed_c10d._world
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    distributed_c10d._update_default_pg(None)
    distributed_c10d._unregister_all_process_groups()
    world.group_count = 0
