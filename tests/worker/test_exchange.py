"""The gradient exchange against DDP and against arithmetic done in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from resilient.core.batches import Deal
from resilient.errors import ConfigError
from resilient.state.snapshot import AlternatingCopies
from resilient.worker import buckets
from resilient.worker.exchange import GradientExchange
from resilient.worker.exchanges import Exchanges
from tests.worker.ranks import run_ranks

WORLD_SIZE = 4


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    ).to(dtype)


def samples(
    count: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x.to(dtype), torch.randint(4, (count,), generator=generator)


def loss_of(model: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float() if x.dtype is torch.bfloat16 else model(x), y)


def grads_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def params_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_all_equal(results: list[Any]) -> None:
    """Bitwise, rank by rank."""
    for other in results[1:]:
        assert len(other) == len(results[0])
        for a, b in zip(results[0], other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def assert_close(actual: list[Any], expected: list[Any], **tolerance: float) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def parts_of(
    exchanges: Exchanges, rank: int, world_size: int, deal: Deal, step: int = 0
) -> Iterator[slice]:
    """What a Batch does in a loop over its parts."""
    span = deal.batch(step)
    parts = deal.parts(span, rank, world_size)
    exchanges.begin_parts(deal.num_parts_of(span), len(parts))
    if not parts:
        exchanges.part(0, True, 0, span.num_samples, 0)
    previous = 0
    for index, part in enumerate(parts):
        exchanges.part(index, index == len(parts) - 1, part.num_samples, span.num_samples, previous)
        previous = part.num_samples
        yield slice(part.start, part.stop)
    exchanges.end_parts()


@contextlib.contextmanager
def exchanging(
    *modules: nn.Module, world_size: int = WORLD_SIZE, **options: Any
) -> Iterator[Exchanges]:
    exchanges = Exchanges(group=None, world_size=world_size)
    for module in modules:
        exchanges.add(module, **options)
    yield exchanges
    exchanges.detach()


# ---------------------------------------------------------------- against DDP


def train_ours(rank: int, dtype: torch.dtype, num_steps: int, remake_at: int) -> list[Any]:
    model = mlp(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = GradientExchange(model, group=None, world_size=WORLD_SIZE)
    for step in range(num_steps):
        if step == remake_at:  # another generation: its own group, its own hooks
            exchange.detach()
            exchange = GradientExchange(
                model, group=dist.new_group(range(WORLD_SIZE)), world_size=WORLD_SIZE
            )
        x, y = samples(16, step, dtype)
        loss_of(model, x[rank::4], y[rank::4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


def train_ddp(rank: int, dtype: torch.dtype, num_steps: int) -> list[Any]:
    model = mlp(dtype)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(num_steps):
        x, y = samples(16, step, dtype)
        loss_of(ddp, x[rank::4], y[rank::4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_training_as_ddp_and_same_bits_in_every_generation(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 600)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1500)
    unbroken = run_ranks(tmp_path, WORLD_SIZE, train_ours, dtype, 12, -1)
    broken = run_ranks(tmp_path, WORLD_SIZE, train_ours, dtype, 12, 5)
    ddp = run_ranks(tmp_path, WORLD_SIZE, train_ddp, dtype, 12)
    assert_all_equal(unbroken + broken)
    tolerance = (
        {"rtol": 0.1, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    assert_close(unbroken[0], ddp[0], **tolerance)


# ---------------------------------------------------------------- parts


def whole_gradient(deal: Deal, step: int = 0) -> list[torch.Tensor | None]:
    """Sum over the parts of (n_p / N) * grad_p, in one process and in float64."""
    model = mlp(torch.float64)
    span = deal.batch(step)
    x, y = samples(deal.num_samples, dtype=torch.float64)
    for part in deal.parts(span, 0, 1):
        piece = slice(part.start, part.stop)
        (loss_of(model, x[piece], y[piece]) * part.num_samples / span.num_samples).backward()
    return grads_of(model)


def gradient_by_parts(rank: int, world_size: int, deal: Deal, set_to_none: bool) -> list[Any]:
    model = mlp(torch.float64)
    x, y = samples(deal.num_samples, dtype=torch.float64)
    results: list[Any] = []
    with exchanging(model, world_size=world_size) as exchanges:
        for step in range(deal.num_steps):
            for piece in parts_of(exchanges, rank, world_size, deal, step):
                loss_of(model, x[piece], y[piece]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # looks before flush()
            results += grads_of(model)
            exchanges.flush()
            model.zero_grad(set_to_none)
    return results


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("world_size", "num_parts"),
    [(1, 1), (1, 4), (2, 4), (3, 4), (4, 4), (4, 2), (3, 1)],
    ids=lambda value: str(value),
)
def test_weighted_by_samples_whatever_the_world(tmp_path, world_size, num_parts, set_to_none):
    # 8 + 8 + 8 + 5: the last batch has unequal parts, and not always one for every rank
    deal = Deal(29, 8, num_parts, drop_last=False)
    expected = [grad for step in range(deal.num_steps) for grad in whole_gradient(deal, step)]
    results = run_ranks(tmp_path, world_size, gradient_by_parts, world_size, deal, set_to_none)
    assert_all_equal(results)
    assert_close(results[0], expected)


def flush_alone(rank: int) -> list[Any]:
    """Told of a batch without the loop's begin and end: the exchange still happens, at flush()."""
    model = mlp()
    exchange = GradientExchange(model, group=None, world_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD(mlp().parameters(), lr=1.0)
    x, y = samples(8)
    for _ in range(2):
        exchange.arm(0.5 if rank < 2 else 0.0)
        if rank < 2:
            piece = slice(4 * rank, 4 * rank + 4)
            loss_of(model, x[piece], y[piece]).backward()
        exchange.flush(other)
        exchange.flush(optimizer)
        exchange.flush(optimizer)  # once a batch
        result = grads_of(model)
        model.zero_grad()
    exchange.detach()
    return result


def test_a_rank_without_a_part_takes_part_at_flush(tmp_path):
    results = run_ranks(tmp_path, 3, flush_alone)
    assert_all_equal(results)
    assert_close(results[0], [g.float() for g in whole_gradient(Deal(8, 8, 2)) if g is not None])


class Gan:
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 8)).to(dtype)
        self.d = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)
        self.opt_g = torch.optim.SGD(self.g.parameters(), lr=0.1, momentum=0.9)
        self.opt_d = torch.optim.SGD(self.d.parameters(), lr=0.1, momentum=0.9)


def train_gan(
    rank: int, world_size: int, deal: Deal, clear_late: bool, set_to_none: bool
) -> list[Any]:
    """Two modules, two loops over each batch, two backwards for the discriminator, and its
    gradients left uncleared while the generator's backward runs through it."""
    gan = Gan()
    x, _ = samples(deal.num_samples, dtype=torch.float64)
    noise = x[:, :3].flip(1)
    with exchanging(gan.g, gan.d, world_size=world_size) as exchanges:
        gan.opt_g.register_step_pre_hook(lambda optimizer, *_: exchanges.flush(optimizer))
        gan.opt_d.register_step_pre_hook(lambda optimizer, *_: exchanges.flush(optimizer))
        for step in range(deal.num_steps):
            if clear_late:
                gan.opt_d.zero_grad(set_to_none)
            for piece in parts_of(exchanges, rank, world_size, deal, step):
                F.softplus(-gan.d(x[piece])).mean().backward()
                F.softplus(gan.d(gan.g(noise[piece]).detach())).mean().backward()
            gan.opt_d.step()
            if not clear_late:
                gan.opt_d.zero_grad(set_to_none)
            gan.opt_g.zero_grad(set_to_none)
            for piece in parts_of(exchanges, rank, world_size, deal, step):
                F.softplus(-gan.d(gan.g(noise[piece]))).mean().backward()
            gan.opt_g.step()
            if not clear_late:
                gan.opt_d.zero_grad(set_to_none)
    return params_of(gan.g) + params_of(gan.d)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear_late", [True, False])
def test_a_gan_in_worlds_of_every_size(tmp_path, clear_late, set_to_none):
    deal = Deal(52, 8, 4, drop_last=False)  # the last batch has two parts
    alone = run_ranks(tmp_path, 1, train_gan, 1, deal, clear_late, set_to_none)
    for world_size in (3, 4, 5):
        results = run_ranks(
            tmp_path, world_size, train_gan, world_size, deal, clear_late, set_to_none
        )
        assert_all_equal(results)
        assert_close(results[0], alone[0])


def accumulate(rank: int, world_size: int, deal: Deal) -> list[Any]:
    """zero_grad() only after two batches: the gradients of both add up."""
    model = mlp(torch.float64)
    x, y = samples(deal.num_samples, dtype=torch.float64)
    with exchanging(model, world_size=world_size) as exchanges:
        for step in range(2):
            for piece in parts_of(exchanges, rank, world_size, deal, step):
                loss_of(model, x[piece], y[piece]).backward()
            exchanges.flush()
    return grads_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_that_are_not_cleared_add_up_once(tmp_path, world_size):
    deal = Deal(14, 8, 4, drop_last=False)
    first, second = whole_gradient(deal, 0), whole_gradient(deal, 1)
    results = run_ranks(tmp_path, world_size, accumulate, world_size, deal)
    assert_all_equal(results)
    assert_close(results[0], [a + b for a, b in zip(first, second, strict=True)])


def clear_between_parts(rank: int, set_to_none: bool) -> str:
    model = mlp()
    x, y = samples(8)
    with exchanging(model, world_size=2) as exchanges, pytest.raises(ConfigError) as raised:
        for piece in parts_of(exchanges, rank, 2, Deal(8, 8, 4)):
            model.zero_grad(set_to_none)
            loss_of(model, x[piece], y[piece]).backward()
    return str(raised.value)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_between_parts_is_refused(tmp_path, set_to_none):
    for message in run_ranks(tmp_path, 2, clear_between_parts, set_to_none):
        assert "between the parts" in message and "zero_grad() after optimizer.step()" in message


# ---------------------------------------------------------------- kinds of modules


class Branching(nn.Module):
    """Uses `even` or `odd` as it is told; `never` never; `frozen` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.even, self.odd, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, is_even: bool) -> torch.Tensor:
        h = self.frozen(self.first(x))
        return self.even(h) if is_even else self.odd(h)


def branches(rank: int, use_ddp: bool) -> list[Any]:
    model = Branching()
    x, y = samples(16)
    x, y = x[rank::4], y[rank::4]
    results: list[Any] = []
    if use_ddp:
        ddp: Any = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        ddp, exchange = model, GradientExchange(model, group=None, world_size=WORLD_SIZE)
    for step in range(3):
        loss_of(lambda x, step=step: ddp(x, (rank + step) % 2 == 0), x, y).backward()
        results += grads_of(model)
        model.zero_grad()
    if not use_ddp:
        exchange.detach()
    return results


def test_unused_and_frozen_parameters(tmp_path):
    ours = run_ranks(tmp_path, WORLD_SIZE, branches, False)
    ddp = run_ranks(tmp_path, WORLD_SIZE, branches, True)
    assert_all_equal(ours)
    assert [g is None for g in ours[0]] == [g is None for g in ddp[0]]
    assert_close([g for g in ours[0] if g is not None], [g for g in ddp[0] if g is not None])


def unfreeze(rank: int) -> str:
    model = Branching()
    with exchanging(model, world_size=2) as exchanges:
        model.frozen.requires_grad_(True)
        with pytest.raises(ConfigError) as raised:
            exchanges.part(0, True, 4, 8, 0)
    return str(raised.value)


def test_unfreezing_later_is_refused(tmp_path):
    for message in run_ranks(tmp_path, 2, unfreeze):
        assert "frozen.weight was frozen" in message


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("small", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def norms(rank: int) -> Any:
    model = Normed()
    x, y = samples(32)
    local = Normed()
    with exchanging(model) as exchanges:
        for piece in parts_of(exchanges, rank, WORLD_SIZE, Deal(32, 32, 8)):
            # Two forwards before two backwards: what the first saved must still be usable.
            one, two = loss_of(model, x[piece], y[piece]), loss_of(model, x[piece], y[piece])
            if rank == 0:
                local(x[piece]), local(x[piece])
                model.flag.logical_not_()
                model.small += 0.1
            one.backward()
            two.backward()
    return [b.clone() for b in model.buffers()], [b.clone() for b in local.buffers()]


def test_buffers_follow_rank_zero(tmp_path):
    results = run_ranks(tmp_path, WORLD_SIZE, norms)
    assert_all_equal([buffers for buffers, _ in results])
    buffers, alone = results[0]
    flag, small, _, _, _, num_batches_tracked = buffers
    assert all(torch.equal(a, b) for a, b in zip(buffers[3:], alone[3:], strict=True))
    assert int(num_batches_tracked) == 4
    assert flag.tolist() == [True, False]
    tenth = torch.tensor(0.1, dtype=torch.bfloat16)
    assert torch.equal(small, torch.stack([tenth + tenth] * 3))


class Remembering(nn.Module):
    """Large buffers, one written and one not, and one that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 4)
        self.register_buffer("history", torch.zeros(30_000))
        self.register_buffer("mask", torch.ones(30_000))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.body(x)


def large_and_replaced_buffers(rank: int) -> Any:
    model = Remembering()
    x, y = samples(32)
    copies, kept = AlternatingCopies(), []
    with exchanging(model) as exchanges:
        for step in range(3):
            for piece in parts_of(exchanges, rank, WORLD_SIZE, Deal(32, 32, 4)):
                if rank == 0:
                    model.history += 1
                loss_of(model, x[piece], y[piece]).backward()
            # What the commit keeps: a large buffer is copied when its version says that it moved.
            taken = copies.take(step, dict(model.named_buffers()), set())
            kept.append([copy.clone() for copy in taken.values()])
            for name, buffer in model.named_buffers():
                assert torch.equal(taken[name], buffer), name
            model.zero_grad()
    return kept, model.mask._version


def test_what_a_commit_keeps_of_large_and_of_replaced_buffers_is_rank_zeros(tmp_path):
    results = run_ranks(tmp_path, WORLD_SIZE, large_and_replaced_buffers)
    for step in range(3):
        assert_all_equal([kept[step] for kept, _ in results])
        history, _, mean = results[0][0][step]
        assert history[0] == step + 1 and mean.any()
    assert [version for _, version in results] == [0] * WORLD_SIZE  # left alone


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = checkpoint(
                lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=self.use_reentrant
            )
        return self.last(x)


def checkpoints(rank: int, use_reentrant: bool) -> list[Any]:
    model = Checkpointed(use_reentrant)
    x, y = samples(16)
    exchange = GradientExchange(model, group=None, world_size=WORLD_SIZE)
    loss_of(model, x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]).backward()
    exchange.detach()
    return grads_of(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(tmp_path, use_reentrant, monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 100)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 300)
    results = run_ranks(tmp_path, WORLD_SIZE, checkpoints, use_reentrant)
    model = Checkpointed(False)
    loss_of(model, *samples(16)).backward()
    assert_all_equal(results)
    assert_close(
        [g for g in results[0] if g is not None], [g for g in grads_of(model) if g is not None]
    )
    assert [g is None for g in results[0]] == [g is None for g in grads_of(model)]


def mixed_dtypes_and_strides(rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            "low": nn.Linear(4, 4).bfloat16(),
            "out": nn.Linear(4, 2),
        }
    )
    exchange = GradientExchange(model, group=None, world_size=2)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
    h = model["conv"](x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
    model["out"](model["low"](h.bfloat16()).float()).sum().backward()
    exchange.detach()
    weight = model["conv"].weight
    assert weight.grad.stride() == weight.stride() and not weight.is_contiguous()
    return grads_of(model)


def test_several_dtypes_and_channels_last(tmp_path):
    results = run_ranks(tmp_path, 2, mixed_dtypes_and_strides)
    assert_all_equal(results)
    assert all(bool(grad.any()) for grad in results[0])


def sparse(rank: int) -> str:
    model = nn.Embedding(4, 8, sparse=True)
    GradientExchange(model, group=None, world_size=2)
    with pytest.raises(ConfigError) as raised:
        model(torch.tensor([1, 2])).sum().backward()
    return str(raised.value)


def test_sparse_gradients_are_refused(tmp_path):
    for message in run_ranks(tmp_path, 2, sparse):
        assert "weight is sparse" in message and "sparse=False" in message


def different(rank: int) -> str:
    model = mlp() if rank else nn.Sequential(*mlp(), nn.Linear(4, 4))
    with pytest.raises(ConfigError) as raised:
        GradientExchange(model, group=None, world_size=2)
    return str(raised.value)


def test_ranks_with_different_modules_are_refused(tmp_path):
    for message in run_ranks(tmp_path, 2, different):
        assert "the ranks have different modules" in message


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameter"):
        GradientExchange(nn.ReLU(), group=None, world_size=1)


# ---------------------------------------------------------------- overlap, kept gradients


def overlap(rank: int) -> Any:
    model = mlp()
    told: list[str] = []
    exchange = GradientExchange(
        model, group=None, world_size=2, on_last_bucket=lambda: told.append("last bucket")
    )
    group, first_grad = exchange._group, next(model.parameters())

    class Spy:
        def allreduce(self, tensors, options):
            told.append("launched")
            return group.allreduce(tensors, options)

        def __getattr__(self, name):
            return getattr(group, name)

    exchange._group = Spy()
    first_grad.register_post_accumulate_grad_hook(lambda _: told.append("last gradient"))
    loss_of(model, *samples(8)).backward()
    told.append("after backward")
    exchange.detach()
    return told


def test_buckets_leave_while_the_backward_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 100)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 300)
    for told in run_ranks(tmp_path, 2, overlap):
        assert told.count("launched") >= 3
        assert "launched" in told[: told.index("last gradient")]
        assert told.count("last bucket") == 1
        assert told[told.index("last bucket") :].count("launched") == 1
        assert told[-1] == "after backward"


def keep_gradients(rank: int, how: str) -> tuple[list[Any], list[Any]]:
    model = mlp()
    exchange = GradientExchange(model, group=None, world_size=2)
    kept: list[list[Any]] = []
    copies: list[list[Any]] = []
    for step in range(3):
        loss_of(model, *samples(8, 10 * step + rank)).backward()
        grads = [p.grad for p in model.parameters()]
        kept.append(grads if how == "same" else [g.detach().view(-1) for g in grads])
        copies.append([g.clone() for g in kept[-1]])
        del grads
        model.zero_grad()
    exchange.detach()
    return [g for gs in kept for g in gs], [g for gs in copies for g in gs]


@pytest.mark.parametrize("how", ["same", "alias"])
def test_gradients_that_a_script_keeps_do_not_change(tmp_path, how):
    for kept, copies in run_ranks(tmp_path, 2, keep_gradients, how):
        assert_all_equal([kept, copies])


def memory_is_reused(rank: int) -> bool:
    model = mlp()
    exchange = GradientExchange(model, group=None, world_size=2)
    places = set()
    for step in range(4):
        loss_of(model, *samples(8, step)).backward()
        places.add(next(model.parameters()).grad.data_ptr())
        model.zero_grad()
    exchange.detach()
    return len(places) == 1


def test_the_buckets_are_used_again(tmp_path):
    assert run_ranks(tmp_path, 2, memory_is_reused) == [True, True]


def detached(rank: int) -> list[Any]:
    model = mlp()
    GradientExchange(model, group=None, world_size=2).detach()
    loss_of(model, *samples(8, rank)).backward()
    return grads_of(model)


def test_nothing_is_exchanged_after_detach(tmp_path):
    one, other = run_ranks(tmp_path, 2, detached)
    assert not torch.equal(one[0], other[0])


# ---------------------------------------------------------------- failures


def lose_a_rank(rank: int, where: str) -> Any:
    model = mlp()
    exchange = GradientExchange(model, group=None, world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: exchange.flush())
    x, y = samples(8)
    for step in range(3):
        exchange.arm(0.5)
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start_s = time.monotonic()
        try:
            if where == "backward" or step < 2:
                loss_of(model, x, y).backward()
            optimizer.step()
        except RuntimeError as error:
            took_s = time.monotonic() - start_s
            exchange.detach()
            assert exchange._group is None
            before = params_of(model)
            model.zero_grad()
            loss_of(model, x, y).backward()  # alone, without hooks
            assert all(p.grad is not None for p in model.parameters())
            assert_all_equal([before, params_of(model)])
            return step, took_s, type(error).__name__
        optimizer.zero_grad()
    return "no error"


@pytest.mark.parametrize("where", ["backward", "flush"])
def test_a_failed_collective_raises_at_once(tmp_path, where):
    survivor, killed = run_ranks(tmp_path, 2, lose_a_rank, where)
    assert killed == -signal.SIGKILL
    step, took_s, name = survivor
    assert step == 2 and took_s < 2 and name != "ConfigError"


def broken_backward(rank: int) -> list[Any]:
    """A backward that raises half way, on every rank; the next batch is as if it had not been."""
    model = mlp()
    exchange = GradientExchange(model, group=None, world_size=2)
    x, y = samples(8, rank)

    def refuse(_: torch.Tensor) -> None:
        raise KeyError("half way")

    exchange.arm(0.5)
    handle = model[2].weight.register_hook(refuse)
    with pytest.raises(KeyError, match="half way"):
        loss_of(model, x, y).backward()
    handle.remove()
    model.zero_grad()
    exchange.arm(0.5)
    loss_of(model, x, y).backward()
    exchange.detach()
    return grads_of(model)


def test_a_backward_that_was_broken_off_leaves_nothing_behind(tmp_path):
    results = run_ranks(tmp_path, 2, broken_backward)
    assert_all_equal(results)
    model = mlp()
    for rank in range(2):
        (loss_of(model, *samples(8, rank)) / 2).backward()
    assert_close(results[0], grads_of(model))
