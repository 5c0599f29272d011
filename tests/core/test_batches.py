"""Every sample exactly once, in an order no world size can change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.core.batches import Deal, epoch_seed, mix, part_seed
from resilient.errors import ConfigError


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    num_parts = draw(st.integers(1, 6))
    global_batch_size = num_parts * draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    least = global_batch_size if drop_last else 1
    return Deal(
        num_samples=draw(st.integers(least, 70 + least)),
        global_batch_size=global_batch_size,
        num_parts=num_parts,
        epochs=draw(st.integers(1, 4)),
        drop_last=drop_last,
    )


def positions(deal: Deal, step: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    span = deal.batch(step)
    return [
        (span.epoch, position)
        for part in deal.parts(span, rank, world_size)
        for position in range(part.start, part.stop)
    ]


@settings(max_examples=300, deadline=None)
@given(deals(), st.data())
def test_every_sample_exactly_once_through_changes_of_the_world(deal: Deal, data: st.DataObject):
    deal.check()
    seen: list[tuple[int, int]] = []
    for step in range(deal.num_steps):
        world_size = data.draw(st.integers(1, 8), label=f"world size of step {step}")
        batch: list[tuple[int, int]] = []
        for rank in range(world_size):
            batch += positions(deal, step, rank, world_size)
        span = deal.batch(step)
        assert sorted(batch) == [(span.epoch, p) for p in range(span.start, span.stop)]
        seen += batch
    per_epoch = deal.num_samples
    if deal.drop_last:
        per_epoch -= deal.num_samples % deal.global_batch_size
    assert sorted(seen) == [(e, p) for e in range(deal.epochs or 0) for p in range(per_epoch)]


@settings(max_examples=200, deadline=None)
@given(deals(), st.integers(1, 9), st.integers(1, 9))
def test_a_part_holds_the_same_samples_in_every_world(deal: Deal, one: int, other: int):
    for step in range(deal.num_steps):
        span = deal.batch(step)

        def dealt(world_size: int, span=span) -> list:
            return sorted(
                p for rank in range(world_size) for p in deal.parts(span, rank, world_size)
            )

        assert dealt(one) == dealt(other)
        assert [part.number for part in dealt(one)] == list(range(deal.num_parts_of(span)))
        assert all(0 < part.num_samples <= deal.part_size for part in dealt(one))
        assert all(part.num_samples == deal.part_size for part in dealt(one)[:-1])


def test_rank_zero_always_has_a_part_and_parts_are_spread_evenly():
    deal = Deal(num_samples=64, global_batch_size=12, num_parts=6, drop_last=False)
    for step in range(deal.num_steps):
        span = deal.batch(step)
        for world_size in range(1, 10):
            counts = [len(deal.parts(span, rank, world_size)) for rank in range(world_size)]
            assert counts[0] >= 1
            assert max(counts) - min(counts) <= 1
            assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "drop_last", "steps"),
    [
        (1, None, True, 3),
        (1, None, False, 4),
        (2, None, True, 6),
        (2, 5, True, 5),
        (2, 50, True, 6),
        (None, 50, True, 50),
        (None, 50, False, 50),
    ],
)
def test_number_of_steps(epochs, max_steps, drop_last, steps):
    deal = Deal(31, 8, 4, epochs, max_steps, drop_last)
    deal.check()
    assert deal.num_steps == steps


def test_the_short_batch_is_the_last_of_its_epoch():
    deal = Deal(31, 8, 4, 2, None, False)
    assert [deal.batch(step).num_samples for step in range(8)] == [8, 8, 8, 7, 8, 8, 8, 7]
    assert [p.num_samples for r in range(4) for p in deal.parts(deal.batch(3), r, 4)] == [
        2,
        2,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("deal", "words"),
    [
        (Deal(100, 64, 3), ["64", "3 equal parts", "63 or 66", "num_parts=2 or 4"]),
        (Deal(100, 2, 3), ["global_batch_size=3", "num_parts=2"]),
        (Deal(10, 64, 4), ["10 samples", "64", "lower global_batch_size", "drop_last=False"]),
        (Deal(0, 64, 4), ["empty"]),
        (Deal(0, 64, 4, drop_last=False), ["empty"]),
        (Deal(100, 0, 4), ["global_batch_size", "at least 1"]),
        (Deal(100, 8, 0), ["num_parts", "at least 1"]),
        (Deal(100, 8, 4, 0), ["epochs"]),
        (Deal(100, 8, 4, 1, -1), ["max_steps"]),
        (Deal(100, 8, 4, None), ["epochs=None", "max_steps"]),
        (Deal(100, 8.0, 4), ["global_batch_size", "8.0"]),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(deal: Deal, words: list[str]):
    with pytest.raises(ConfigError) as raised:
        deal.check()
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_data_set_smaller_than_a_batch_is_one_short_batch_without_drop_last():
    deal = Deal(10, 64, 4, drop_last=False)
    deal.check()
    assert deal.num_steps == 1
    assert deal.num_parts_of(deal.batch(0)) == 1


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**40), st.integers(0, 1000))
def test_seeds_fit_every_generator_and_differ(seed: int, step: int, part: int):
    assert 0 <= epoch_seed(seed, step) < 2**63
    assert 0 <= part_seed(seed, step, part) < 2**63
    assert part_seed(seed, step, part) != part_seed(seed, step, part + 1)
    assert epoch_seed(seed, step) != epoch_seed(seed, step + 1)


def test_seeds_are_what_they_always_were():
    """Another value here would give every job another order of its samples when it is resumed."""
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # SplitMix64's first output from state 0
    assert (epoch_seed(0, 0), epoch_seed(0, 1)) == EPOCH_SEEDS
    assert part_seed(7, 3, 1) == PART_SEED


EPOCH_SEEDS = (8470263088557978857, 5148516027729422207)
PART_SEED = 3674238844226601970
