"""What the exchange of gradients costs beside DDP: the same steps, interleaved, on 4 ranks.

Run: python bench/exchange_cost.py [--ranks 4] [--steps 200]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient.worker.exchanges import Exchanges


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def steps(model: nn.Module, width: int, num_steps: int, before=lambda: None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    x, y = torch.randn(16, width), torch.randint(10, (16,))
    for _ in range(num_steps):
        dist.barrier()
        start = time.perf_counter()
        before()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times


def rank_main(rank: int, num_ranks: int, store: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    for name, sizes, count in (
        ("small MLP, 6 tensors", (64, 128, 128, 10), num_steps),
        ("100 tensors", (64,) * 50 + (10,), num_steps),
        ("20M parameters", (64, 2200, 2200, 2200, 2200, 10), max(6, num_steps // 20)),
    ):
        ours, ddp = mlp(*sizes), DistributedDataParallel(mlp(*sizes))
        exchanges = Exchanges(group=None, world_size=num_ranks)
        exchanges.add(ours)
        our_times: list[float] = []
        ddp_times: list[float] = []
        for _ in range(4):
            our_times += steps(
                ours, sizes[0], count, lambda e=exchanges: e.part(0, True, 16, 16 * num_ranks, 0)
            )
            ddp_times += steps(ddp, sizes[0], count)
        exchanges.detach()
        if rank == 0:
            mine, theirs = statistics.median(our_times), statistics.median(ddp_times)
            print(
                f"{name}: ours {1e6 * mine:.0f} us, DDP {1e6 * theirs:.0f} us, "
                f"difference {1e6 * (mine - theirs):+.0f} us",
                flush=True,
            )
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(options.ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(rank, options.ranks, f"{directory}/store", options.steps)
                finally:
                    os._exit(1)
            children.append(pid)
        failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
