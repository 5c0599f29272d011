"""A GradScaler on ranks that have no part in a batch: they scale, skip and step as the others."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resilient.core.model import Cut, CutKind
from resilient.state.protect import Protected
from resilient.worker.drill import Drills
from resilient.worker.job import Job
from resilient.worker.lifetime import Entry, Lifetime, NoAgent
from tests.worker.ranks import run_ranks

NUM_PARTS = 4
INFINITE_SAMPLE = 9  # in the second batch


def train(rank: int, world_size: int, unscales: bool, accumulates: bool) -> Any:
    """Batches of 8 + 8 + 8 + 2 samples: the last one has a single part."""
    os.environ.pop("RESILIENT_CHECKPOINT", None)
    link = NoAgent()
    lifetime = Lifetime(link, Protected(link.page), Drills(None), first_world_size=NUM_PARTS)
    cut = Cut(CutKind.INITIAL, 0)
    job = Job(lifetime, Entry(0, rank, rank, world_size, cut), torch.device("cpu"))
    torch.manual_seed(0)
    model = job.data_parallel(nn.Linear(4, 3).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    x = torch.randn(26, 4, generator=torch.Generator().manual_seed(1)).double()
    x[INFINITE_SAMPLE] = float("inf")
    data = TensorDataset(x, torch.arange(26) % 3)
    batches = job.batches(data, global_batch_size=8, shuffle=False, drop_last=False)
    job.protect(model=model, optimizer=optimizer, scaler=scaler, batches=batches)
    seen = []
    for batch in batches:
        for features, target in batch:
            scaler.scale(F.cross_entropy(model(features), target)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad(set_to_none=not accumulates)
    job._finish()
    step = job.step
    job._close()
    return step, seen, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("accumulates", [False, True], ids=["to none", "to zero"])
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale and clip"])
def test_ranks_without_a_part_scale_as_the_others(tmp_path, unscales, accumulates):
    alone = run_ranks(tmp_path, 1, train, 1, unscales, accumulates)[0]
    assert alone[:2] == (4, [1024.0, 512.0, 512.0, 1024.0]), "skips the second, grows after two"
    for world_size in (3, NUM_PARTS, NUM_PARTS + 1):  # the last rank of these never has a part
        results = run_ranks(tmp_path, world_size, train, world_size, unscales, accumulates)
        for step, seen, params in results:
            assert (step, seen) == alone[:2]
            for mine, first, expected in zip(params, results[0][2], alone[2], strict=True):
                assert torch.equal(mine, first)
                torch.testing.assert_close(mine, expected)
