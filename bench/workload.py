"""The training that the benchmarks run: the same model, data and optimizer, decorated or plain.

Decorated, it is run by resilient-run. Plain, it is what one writes for torchrun: DDP, and, where it
has to come back after a failure, a checkpoint on every step that is loaded at the start. Bare is
the loop of a single process, without DDP.

Each rank appends what it has committed to a file of its own, with the time on CLOCK_MONOTONIC: one
clock for all processes of a machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("decorated", "plain", "bare"), required=True)
parser.add_argument("--out", type=Path, required=True, help="a directory for this run")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--kill-step", type=int, help="SIGKILL --kill-rank in this step, once")
parser.add_argument("--kill-rank", type=int, default=2)
parser.add_argument("--checkpoint", action="store_true", help="plain: save every step, and load")
parser.add_argument("--pause-ms", type=float, default=0.0, help="what a longer step would take")
args = parser.parse_args()

GLOBAL_BATCH = 64
NUM_FEATURES, NUM_CLASSES, WIDTH = 64, 10, 256
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(1)
features = torch.randn(GLOBAL_BATCH * 32, NUM_FEATURES, generator=generator)
teacher = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)
data = TensorDataset(features, (features @ teacher).argmax(1))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


class Log:
    """Lines "ns committed-steps generation processor-ns", written at once."""

    def __init__(self, rank: int) -> None:
        self._fd = os.open(
            args.out / f"steps-{rank}-{os.getpid()}.txt",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o644,
        )

    def committed(self, num_steps: int, generation: int) -> None:
        now_ns, processor_ns = time.monotonic_ns(), time.process_time_ns()
        os.write(self._fd, f"{now_ns} {num_steps} {generation} {processor_ns}\n".encode())


def maybe_die(rank: int, step: int) -> None:
    """At the beginning of the step, so that nobody can finish it."""
    if step != args.kill_step or rank != args.kill_rank:
        return
    try:
        fd = os.open(args.out / "killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return  # once
    os.write(fd, f"{time.monotonic_ns()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def run_decorated() -> None:
    import resilient

    @resilient.train
    def main(job: resilient.Job) -> None:
        log = Log(job.rank)
        model = job.data_parallel(job.build(build))
        optimizer = torch.optim.AdamW(model.parameters())
        batches = job.batches(
            data, global_batch_size=GLOBAL_BATCH, epochs=None, max_steps=args.steps
        )
        job.protect(model=model, optimizer=optimizer, batches=batches)
        for batch in batches:
            step = job.step
            if step:
                log.committed(step, job.generation)
            maybe_die(job.rank, step)
            for inputs, targets in batch:
                F.cross_entropy(model(inputs), targets).backward()
            if args.pause_ms:
                time.sleep(args.pause_ms / 1000)
            optimizer.step()
            optimizer.zero_grad()
        log.committed(args.steps, job.generation)

    main()


def run_plain() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    log = Log(rank)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    path, step = args.out / "checkpoint.pt", 0
    if args.checkpoint and path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        for index, (inputs, targets) in enumerate(loader):
            if index < step % len(loader):
                continue  # of this epoch's batches, the ones before the checkpoint
            if step >= args.steps:
                break
            maybe_die(rank, step)
            F.cross_entropy(model(inputs), targets).backward()
            if args.pause_ms:
                time.sleep(args.pause_ms / 1000)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if args.checkpoint and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, f"{path}.new")
                os.replace(f"{path}.new", path)
            if not args.checkpoint or rank == 0:
                log.committed(step, generation)
    dist.barrier()
    dist.destroy_process_group()


def run_bare() -> None:
    log = Log(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
    step = 0
    while step < args.steps:
        for inputs, targets in loader:
            if step >= args.steps:
                break
            F.cross_entropy(model(inputs), targets).backward()
            if args.pause_ms:
                time.sleep(args.pause_ms / 1000)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.committed(step, 0)


if __name__ == "__main__":
    {"decorated": run_decorated, "plain": run_plain, "bare": run_bare}[args.mode]()
