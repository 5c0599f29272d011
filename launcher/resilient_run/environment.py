"""The environment of a worker: torchrun's contract, to the letter, for every way one is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from resilient.core.model import Member, Plan, Slot
from resilient_run.options import Options

OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def of_member(options: Options, plan: Plan, member: Member, restart_count: int) -> dict[str, str]:
    """What depends on the rank and the generation."""
    nodes = sorted({m.slot.node for m in plan.members})
    local = [m for m in plan.members if m.slot.node == member.slot.node]
    return {
        "RANK": str(member.rank),
        "LOCAL_RANK": "0" if options.virtual_local_rank else str(member.slot.local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(nodes.index(member.slot.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(member.rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.store[0],
        "MASTER_PORT": str(plan.store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        **_of_device(options, member.slot),
    }


def of_process(
    options: Options,
    plan: Plan | None,
    slot: Slot | None,
    restart_count: int,
    error_file: str,
) -> Mapping[str, str | None]:
    """On top of the agent's own environment; None unsets. A spare has no rank yet."""
    environment: dict[str, str | None] = {
        "ROLE_NAME": options.role,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.config.max_restarts),
        "TORCHELASTIC_RUN_ID": options.run_id,
        # The store is here: rank 0 connects to it like everybody else, and hosts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "" if error_file == os.devnull else error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if options.checkpoint_dir:
        directory = os.path.abspath(options.checkpoint_dir)
        environment["RESILIENT_CHECKPOINT"] = f"{directory},{options.checkpoint_every}"
    member = None
    if plan is not None and slot is not None:
        member = next((m for m in plan.members if m.slot == slot), None)
    if plan is not None and member is not None:
        environment.update(of_member(options, plan, member, restart_count))
    else:
        environment.update(dict.fromkeys(OF_A_RANK))
        if slot is not None:
            environment.update(_of_device(options, slot))
    return environment


def _of_device(options: Options, slot: Slot) -> dict[str, str]:
    """--virtual-local-rank: each worker sees its own accelerator only, as device 0."""
    if not options.virtual_local_rank:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [d.strip() for d in visible.split(",")] if visible else []
    device = devices[slot.local_rank] if slot.local_rank < len(devices) else str(slot.local_rank)
    return {"CUDA_VISIBLE_DEVICES": device}
