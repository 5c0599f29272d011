"""A small training script for the worker tests; what it does wrong, if anything, is in $TOY.

It writes to $OUT: a line for each entry of the train function, and the final parameters.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import resilient

OUT = Path(os.environ["OUT"])
TOY = os.environ.get("TOY", "").split()
STEPS = int(os.environ.get("STEPS", "12"))


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(96, 10, generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.inputs[index].argmax()


SAMPLES = Samples()


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )


def tell(name: str, text: str) -> None:
    with open(OUT / name, "a") as file:
        file.write(text + "\n")


def digest(module: nn.Module) -> str:
    data = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    return hashlib.sha256(data).hexdigest()


@resilient.train
def main(job: resilient.Job) -> None:
    tell("entries", f"{os.getpid()} {job.generation} {job.rank} {job.world_size}")
    assert os.environ["RANK"] == str(job.rank) and dist.get_world_size() == job.world_size
    if "gather-in-main" in TOY:
        dist.barrier()
    net = job.build(build_net)
    if "own-init" in TOY:
        nn.init.normal_(net[0].weight, std=0.1)
    model = job.data_parallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = job.batches(SAMPLES, 24, num_parts=4, epochs=None, max_steps=STEPS)
    job.protect(model=model, optimizer=optimizer, batches=batches)
    tell("restored", f"{job.generation} {job.rank} {job.step}")
    if "stop-after-restore" in TOY and job.generation == 0 and job.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    for batch in batches:
        if "swallow" in TOY:
            try:
                train(job, model, optimizer, batch)
            except Exception as error:
                tell("swallowed", type(error).__name__)
        else:
            train(job, model, optimizer, batch)
        if "evaluate" in TOY and job.step % 4 == 3:
            with job.section("evaluate"):
                dist.all_reduce(torch.ones(1))
    if "wait-at-end" in TOY and job.generation == 0 and job.rank == 1:
        while True:  # until the abort
            dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    tell("final", f"{job.rank} {job.step} {digest(net)}")


def train(job: resilient.Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch) -> None:
    for inputs, targets in batch:
        functional.cross_entropy(model(inputs), targets).backward()
    if "raise" in TOY and job.step == 5 and job.rank == 1 and job.generation == 0:
        raise ValueError("the toy's own")
    if "raise-always" in TOY and job.step == 5 and job.rank == 1:
        raise ValueError("the toy's own")
    if "slow" in TOY:
        time.sleep(0.05)
    optimizer.step()
    optimizer.zero_grad()


torch.manual_seed(1)
main()
assert not dist.is_initialized()
tell("after", f"{os.getpid()}")
sys.stdout.flush()
