"""The training script of the recovery tests: small, and with everything that breaks exactness.

BatchNorm (buffers), dropout (each rank's own random numbers), AdamW, a scheduler, shuffling. It
writes what the checkers need: the sample indexes of every part it was given, and at the end the
parameters.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import resilient

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 512, 20, 5


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=draw)
        self.targets = self.inputs[:, :NUM_CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int):
        return self.inputs[index], self.targets[index], index


def build_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Dropout(0.0 if ARGS.no_dropout else 0.2),
        nn.Linear(48, NUM_CLASSES),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause-s", type=float, default=0.0, help="made longer by this a step")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--no-batch-norm", action="store_true")
    parser.add_argument("--logged-loss", action="store_true", help="all_reduce after the step")
    parser.add_argument("--section-every", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--late-kill-rank", type=int, default=-1, help="dies after its last step")
    parser.add_argument("--default-parts", action="store_true", help="of a global batch of 64")
    return parser.parse_args()


ARGS = parse()
SAMPLES = Samples()


@resilient.train
def main(job: resilient.Job) -> None:
    torch.set_num_threads(1)
    net = job.build(build_net)
    if ARGS.no_batch_norm and isinstance(net[1], nn.BatchNorm1d):
        net[1] = nn.Identity()
    model = job.data_parallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    batches = job.batches(
        SAMPLES,
        global_batch_size=64 if ARGS.default_parts else 48,
        num_parts=None if ARGS.default_parts else 12,
        epochs=None,
        max_steps=ARGS.steps,
        num_workers=ARGS.num_workers,
    )
    torch.manual_seed(100 + job.rank)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)
    used = open(ARGS.out / f"samples-{os.getpid()}.txt", "a", buffering=1)
    for batch in batches:
        step = job.step
        for inputs, targets, indexes in batch:
            numbers = " ".join(map(str, indexes.tolist()))
            used.write(f"{step} {job.generation} {job.rank} {numbers}\n")
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        if ARGS.logged_loss:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
        scheduler.step()
        optimizer.zero_grad()
        if ARGS.pause_s:
            time.sleep(ARGS.pause_s)
        if ARGS.section_every and (step + 1) % ARGS.section_every == 0:
            with job.section("evaluate", timeout_s=60):
                shown = loss.detach().clone()
                dist.all_reduce(shown)
    used.close()
    marker = ARGS.out / "late-kill-done"
    if job.rank == ARGS.late_kill_rank and not marker.exists():
        marker.touch()
        deadline = time.monotonic() + 30
        while not list(ARGS.out.glob("returned-0-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rank": job.rank}
    torch.save(state, ARGS.out / f"final-{job.rank}.pt")
    (ARGS.out / f"returned-{job.rank}-{os.getpid()}").touch()


main()
with open(ARGS.out / "after-main.txt", "a") as after:
    after.write(f"{os.getpid()} {dist.is_initialized()}\n")
