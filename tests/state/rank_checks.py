"""What the ranks of test_transfer do; each function is one test's body, on every rank."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from resilient.core.cut import source_of
from resilient.core.model import Cut, CutKind, Holding
from resilient.errors import ConfigError
from resilient.page import Page
from resilient.state import disk, transfer
from resilient.state.protect import STEPS_WITH_UNDO, Protected
from resilient.state.snapshot import Image

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _odd_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4)]:
            raw = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
            flat = raw.reshape(-1)[: raw.numel() // 16 * dtype.itemsize].clone()
            if dtype == torch.bool:
                flat = flat % 2
            tensors[f"{dtype}{shape}"] = flat.view(dtype).reshape(shape)  # NaNs of all kinds too
    tensors["channels last"] = torch.randn(2, 3, 4, 5, generator=generator).to(
        memory_format=torch.channels_last
    )
    tensors["transposed"] = torch.randn(700, 600, generator=generator).t()
    tensors["a slice"] = torch.randn(50, 40, generator=generator)[3:40, ::2]
    tensors["conjugate"] = torch.randn(4, dtype=torch.complex64, generator=generator).conj()
    tensors["long"] = torch.randn(500_000, generator=generator)
    return tensors


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def every_kind_of_tensor(rank: int, world_size: int, directory: Path) -> None:
    """Two holders, five receivers, messages of 100 kB: each tensor arrives bit by bit."""
    transfer.CHUNK_BYTES, transfer.SMALL_BYTES = 100_000, 10_000
    cut = Cut(CutKind.MEMORY, 5, (1, 4))
    tensors = _odd_tensors()
    progress = []
    if rank in cut.holders:
        image = Image(5, {"cursor": {"consumed": rank}}, parameters=tensors)
        to = transfer.receivers_of(cut, rank, world_size)
        assert to == ([0, 3, 6] if rank == 1 else [2, 5])
        transfer.send(image, to, dist.group.WORLD, lambda: progress.append(1))
    else:
        source = source_of(cut, rank, world_size)
        memory = {key: torch.empty_like(t) for key, t in tensors.items()}  # strides kept
        image = transfer.receive(
            source,
            lambda section, key, dtype, shape, kind: memory[key],
            dist.group.WORLD,
            lambda: progress.append(1),
        )
        assert image.step == 5 and image.tree == {"cursor": {"consumed": source}}
        assert source == {0: 1, 2: 4, 3: 1, 5: 4, 6: 1}[rank]
        for key, tensor in tensors.items():
            got = image.parameters[key]
            assert got is memory[key]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape, key
            assert _bits(got) == _bits(tensor), key
    assert len(progress) > 30


def memory_is_bounded(rank: int, world_size: int, directory: Path) -> None:
    """400 MB go over; beside the state itself no more than a few chunks are used."""
    num = 25_000_000
    state = {str(i): torch.full((num,), float(i)) for i in range(4)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if rank == 0:
        transfer.send(Image(1, parameters=state), [1, 2], dist.group.WORLD, lambda: None)
    else:
        for tensor in state.values():
            tensor.zero_()
        image = transfer.receive(
            0, lambda s, key, *rest: state[key], dist.group.WORLD, lambda: None
        )
        assert all(torch.all(image.parameters[str(i)] == i) for i in range(4))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 4 * 64 + 60, f"grew by {grown:.0f} MiB"


# ---------------------------------------------------------------- through Protected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 6, bias=False)
        self.tied = nn.Linear(8, 6, bias=False)
        self.tied.weight = self.b.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.a(x)), 0.3)
        return self.b(x) + self.tied(x)


def _build() -> dict:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _step(objects: dict, protected: Protected, step: int, world_size: int, commit=True) -> None:
    objects["optimizer"].zero_grad()
    x = torch.randn(4, 6)  # of the rank's own generators
    objects["model"](x).square().mean().backward()
    for param in objects["model"].parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    for buffer in objects["model"].buffers():
        dist.broadcast(buffer, 0)
    protected.tentative(step)
    objects["optimizer"].step()
    objects["scheduler"].step()
    if commit:
        protected.commit(step)


def _bits_of(objects: dict) -> bytes:
    tensors = [*objects["model"].parameters(), *objects["model"].buffers()]
    for state in objects["optimizer"].state_dict()["state"].values():
        tensors += state.values()
    rate = objects["optimizer"].param_groups[0]["lr"]
    return b"".join(map(_bits, tensors)) + repr((rate, objects["scheduler"].state_dict())).encode()


def _assert_equal_on_all_ranks(objects: dict) -> None:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, _bits_of(objects))
    assert all(other == found[0] for other in found)


def _enter(protected: Protected, cut: Cut, rank: int, world_size: int, predecessor=None) -> dict:
    objects = _build()
    step = protected.protect(
        objects,
        cut=cut,
        rank=rank,
        world_size=world_size,
        group=dist.group.WORLD,
        predecessor=predecessor,
    )
    assert step == cut.step
    return objects


def replicas_begin_equal(rank: int, world_size: int, directory: Path) -> None:
    torch.manual_seed(rank)
    protected = Protected()
    draws = torch.get_rng_state()
    objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    _assert_equal_on_all_ranks(objects)
    # the generators stay each rank's own
    assert not torch.equal(torch.get_rng_state(), draws) and protected.holdings()
    everyones: list = [None] * world_size
    dist.all_gather_object(everyones, bytes(torch.get_rng_state().numpy()))
    assert len(set(everyones)) == world_size


def joiners_become_twins(rank: int, world_size: int, directory: Path) -> None:
    """Ranks 0 and 2 lose everything after step 3, as replaced processes would, rank 3 is caught
    dirty; all go on, and end as the ranks of an unbroken run do."""

    def unbroken() -> bytes:
        torch.manual_seed(100 + rank)
        protected = Protected()
        objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
        for step in range(1, 8):
            _step(objects, protected, step, world_size)
        return _bits_of(objects) + bytes(torch.get_rng_state().numpy())

    expected = unbroken()
    torch.manual_seed(100 + rank)
    page = Page.create()
    protected = Protected(page)
    objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    for step in range(1, 4):
        _step(objects, protected, step, world_size)
    # an undo copy is there in the first steps of an entry
    protected._num_commits = STEPS_WITH_UNDO - 1
    _step(objects, protected, 4, world_size, commit=rank == 2)
    predecessor = None
    if rank in (0, 2):
        torch.manual_seed(5)
        protected, predecessor = Protected(), page
    else:
        assert protected.holdings() == (Holding(3, "undo"),)
    objects = _enter(protected, Cut(CutKind.MEMORY, 3, (1, 3)), rank, world_size, predecessor)
    _assert_equal_on_all_ranks(objects)
    assert objects["model"].tied.weight is objects["model"].b.weight
    for step in range(4, 8):
        _step(objects, protected, step, world_size)
    _assert_equal_on_all_ranks(objects)
    assert _bits_of(objects) + bytes(torch.get_rng_state().numpy()) == expected
    page.close()


def behind_by_one(rank: int, world_size: int, directory: Path) -> None:
    """Rank 0 committed step 3, the others did not: they have its generators all the same."""
    torch.manual_seed(rank)
    protected = Protected()
    objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    for step in range(1, 3):
        _step(objects, protected, step, world_size)
    _step(objects, protected, 3, world_size, commit=rank == 0)
    state = torch.get_rng_state()
    notes: list = []
    protected._note = notes.append
    if rank == 0:
        assert protected.holdings()[0] == Holding(3, "live")
    torch.manual_seed(1)
    objects = _enter(protected, Cut(CutKind.MEMORY, 3, (0,)), rank, world_size)
    assert torch.equal(torch.get_rng_state(), state) and not notes
    _assert_equal_on_all_ranks(objects)
    assert protected.holdings()[0] == Holding(3, "live")


def other_model_at_a_joiner(rank: int, world_size: int, directory: Path) -> None:
    """A ConfigError that names the tensor, on the rank whose model differs, and intact state."""
    protected = Protected()
    _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    if rank == 0:
        _enter(protected, Cut(CutKind.MEMORY, 0, (0,)), rank, world_size)
        return
    model = Net()
    model.a = nn.Linear(6, 9)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        Protected().protect(
            {"model": model, "optimizer": optimizer},
            cut=Cut(CutKind.MEMORY, 0, (0,)),
            rank=rank,
            world_size=world_size,
            group=dist.group.WORLD,
        )
    except ConfigError as error:
        assert "model.a.weight" in str(error)
        # what is on its way is taken, so that the group can be left in order
        rest = torch.empty(sum(t.nbytes for t in [*Net().parameters(), *Net().buffers()]))
        dist.recv(rest.view(torch.uint8)[: rest.numel()], 0)
    else:
        raise AssertionError("a model of another shape was accepted")


def late_collective(rank: int, world_size: int, directory: Path) -> None:
    """A logged loss after optimizer.step(): from then on there is an undo copy at every step."""
    notes: list = []
    protected = Protected(note=notes.append)
    objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    for step in range(1, STEPS_WITH_UNDO + 3):
        _step(objects, protected, step, world_size)
    assert protected._undo is None and not notes
    _step(objects, protected, step + 1, world_size, commit=False)
    dist.all_reduce(torch.ones(1))
    protected.commit(step + 1)
    assert len(notes) == 1 and "job.section()" in notes[0] and "MiB" in notes[0]
    for later in range(step + 2, step + 6):
        _step(objects, protected, later, world_size, commit=False)
        dist.all_reduce(torch.ones(1))
        assert protected._held(later - 1) is protected._undo
        protected.commit(later)
    assert len(notes) == 1, "said once"


def _wait(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.001)


def generators_come_late(rank: int, world_size: int, directory: Path) -> None:
    """Rank 1 stops in the middle of leaving its generators, twice at once: one goes on when all
    but them is written, the other when the checkpoint is published and what was left is removed."""
    notes: list[str] = []
    target = directory / "checkpoints"
    final = target / "step-00000002"
    protected = Protected(note=notes.append, checkpoint_directory=str(target))
    objects = _enter(protected, Cut(CutKind.INITIAL, 0), rank, world_size)
    own = target / ".rng-step-00000002-00001"
    began: list[Any] = []
    in_place = os.replace

    def late(source: Any, place: Any) -> None:
        if place == own:
            began.append(place)
            if len(began) == 1:
                _wait(lambda: list(target.glob(".pending-*/.metadata")), "rank 0 to write its part")
                assert not final.exists(), "published without rank 1"
            else:
                _wait(lambda: final.exists() and not own.exists(), "rank 0 to publish")
        in_place(source, place)

    os.replace = late
    for step in (1, 2):
        _step(objects, protected, step, world_size)
    mine = protected._generators.by_step[2]
    protected.persist(2, str(target))
    _wait(lambda: rank != 1 or began, "the thread that writes to begin")
    protected.holdings()
    assert protected._checkpoints.wait_idle(30)
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, (mine, notes))
    assert [said for _, said in everyones] == [[]] * world_size
    if rank == 0:
        assert disk.newest_complete(target) == 2
        for other, (rng, _) in enumerate(everyones):
            assert disk.load(target, 2, other)[1] == rng
        protected._checkpoints._close()
        assert os.listdir(target) == ["step-00000002"]


def a_holder_dies_in_the_middle(rank: int, world_size: int, directory: Path) -> None:
    """The receiver's call raises, it holds nothing, and can be given the state afterwards."""
    protected = Protected()
    big = nn.Linear(3000, 3000)
    transfer.CHUNK_BYTES = 1 << 20
    group = dist.new_group([0, 1])
    objects = {"model": big}
    if rank == 0:
        protected.protect(objects, cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1)

        class Gone(Exception):
            pass

        calls = []

        def progress() -> None:
            calls.append(1)
            if len(calls) == 5:
                raise Gone

        protected._progress = progress  # type: ignore[method-assign]
        try:
            protected.protect(
                objects, cut=Cut(CutKind.MEMORY, 0, (0,)), rank=0, world_size=2, group=group
            )
        except Gone:
            pass
        assert protected.holdings() == (Holding(0, "live"),), "a keeper stays one"
        dist.destroy_process_group(group)
        del group
    else:
        try:
            protected.protect(
                objects, cut=Cut(CutKind.MEMORY, 0, (0,)), rank=1, world_size=2, group=group
            )
        except RuntimeError:
            pass
        else:
            raise AssertionError("half a state was taken for a whole one")
        assert protected.holdings() == ()
    del protected
