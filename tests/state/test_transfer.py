"""State between real ranks over gloo: bit by bit, in bounded memory, twins afterwards."""

from __future__ import annotations

import pytest

from resilient.core.cut import source_of
from resilient.core.model import Cut, CutKind
from resilient.state.transfer import _pieces, receivers_of
from tests.state.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    server = Ranks()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("check", "world_size"),
    [
        ("every_kind_of_tensor", 7),
        ("memory_is_bounded", 3),
        ("replicas_begin_equal", 3),
        ("joiners_become_twins", 4),
        ("behind_by_one", 3),
        ("other_model_at_a_joiner", 2),
        ("late_collective", 2),
        ("a_holder_dies_in_the_middle", 2),
        ("generators_come_late", 3),
    ],
)
def test_on_ranks(ranks, check, world_size, tmp_path):
    ranks.run(f"rank_checks:{check}", world_size, tmp_path)


def test_everyone_has_one_holder():
    for world_size in range(1, 9):
        for mask in range(1, 2**world_size):
            holders = tuple(rank for rank in range(world_size) if mask >> rank & 1)
            cut = Cut(CutKind.MEMORY, 3, holders)
            pairs = [(h, r) for h in holders for r in receivers_of(cut, h, world_size)]
            assert sorted(r for _, r in pairs) == sorted(set(range(world_size)) - set(holders))
            assert all(source_of(cut, r, world_size) == h for h, r in pairs)
            loads = [len(receivers_of(cut, h, world_size)) for h in holders]
            assert max(loads) - min(loads) <= 1


def test_nobody_sends_without_a_memory_cut():
    assert receivers_of(Cut(CutKind.INITIAL, 0), 0, 4) == []
    assert receivers_of(Cut(CutKind.DISK, 7), 0, 4) == []


def test_pieces_cover_every_byte_once(monkeypatch):
    monkeypatch.setattr("resilient.state.transfer.CHUNK_BYTES", 100)
    monkeypatch.setattr("resilient.state.transfer.SMALL_BYTES", 30)
    sizes = [0, 1, 29, 30, 100, 101, 250, 0, 7, 20, 20, 20, 20, 20, 20, 99]
    seen = {index: [] for index in range(len(sizes))}
    for piece in _pieces(sizes):
        assert 0 < sum(part.num_bytes for part in piece) <= 100
        for part in piece:
            seen[part.index] += range(part.start, part.start + part.num_bytes)
    assert all(sorted(got) == list(range(sizes[i])) for i, got in seen.items())
