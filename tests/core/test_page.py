"""The progress page: what one process writes another reads, and no kill makes it lie."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from resilient import page as pages
from resilient.page import Activity, Page


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create("test")
    yield made
    made.close()


def small_state(step: int, kind: int, size: int, every: int = 1) -> bytes:
    """Content that says which write it is of, all over; sizes differ. It changes with every
    `every`-th write."""
    number = (2 * step + kind) // every
    word = number.to_bytes(7, "little") + b"\xa5"
    return word * (size // 8 + number * 7 % 50)


def write_for_ever(page: Page, size: int, every: int) -> None:
    """As a worker does: before the gradients leave, and at the commit."""
    step, data = 0, b""
    while True:
        step += 1
        for kind in (0, 1):
            new = small_state(step, kind, size, every)
            data = data if data == new else new  # the same object again where nothing changed
            page.keep(step, data)
        page.commit(step)


def kill_a_writer(page: Page, size: int, every: int, rng: random.Random) -> int:
    """Runs a writer, kills it at some moment after a few steps; returns its committed steps."""
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(page, size, every)
        finally:
            os._exit(1)
    wanted = 2 + rng.randrange(7)
    deadline_s = time.monotonic() + 20
    while page.read().step < wanted:
        assert time.monotonic() < deadline_s, f"the writer got to {page.read().step} of {wanted}"
        time.sleep(0.0002)
    time.sleep(rng.uniform(0, 0.002))  # any moment will do
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    return page.read().step


def records_of(page: Page) -> list[list[int]]:
    """sequence, step, area, length, checksum of each."""
    return [
        list(page._words[first : first + pages._RECORD_WORDS])
        for first in range(
            pages._RECORDS,
            pages._RECORDS + pages.NUM_RECORDS * pages._RECORD_WORDS,
            pages._RECORD_WORDS,
        )
    ]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("size", [200, 1_000_000], ids=["small", "large"])
def test_a_writer_that_is_killed_at_any_moment_leaves_its_last_two_steps(
    size: int, every: int
) -> None:
    rng = random.Random(size + every)
    torn = 0
    for _ in range(15):
        page = Page.create("victim")
        try:
            step = kill_a_writer(page, size, every, rng)
            torn += any(sequence == 0 for sequence, *_ in records_of(page))
            for kept_step in range(max(0, step - 5), step + 3):
                data = page.kept(kept_step)
                right = {small_state(kept_step, kind, size, every) for kind in (0, 1)}
                assert data is None or data in right, f"wrong bytes for step {kept_step}"
            assert page.kept(step) == small_state(step, 1, size, every), f"step {step} is lost"
            # The one before may still be asked for until the next one's gradients have left, that
            # is, until the next step is kept too: by then every rank has committed this one.
            before = page.kept(step - 1)
            assert (
                before == small_state(step - 1, 1, size, every) or page.kept(step + 1) is not None
            )
        finally:
            page.close()
    if size > 100_000 and every == 1:
        assert torn > 2, "too few kills fell into a write: this test shows nothing"


class Stopped(Exception):
    pass


class TornPage(Page):
    def _fill(self, data: bytes) -> tuple[int, int, int]:
        super()._fill(data)
        raise Stopped


def contents_of(page: Page) -> list[bytes]:
    starts = range(pages.HEADER_BYTES, pages.PAGE_BYTES, pages.AREA_BYTES)
    return [page._map[: pages.HEADER_BYTES], *(page._map[start : start + 512] for start in starts)]


def write_contents(page: Page, contents: list[bytes]) -> None:
    starts = [0, *range(pages.HEADER_BYTES, pages.PAGE_BYTES, pages.AREA_BYTES)]
    for start, data in zip(starts, contents, strict=True):
        page._map[start : start + len(data)] = data


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_torn_only_that_write_is_lost(page: Page, seed: int) -> None:
    """Before each write, one that stops half way is tried: the three before it stand."""
    rng = random.Random(seed)
    data = rng.randbytes(300)
    written: list[tuple[int, bytes]] = []
    torn = TornPage(os.dup(page.fd))
    try:
        for step in range(1, 60):
            before = contents_of(page)
            torn._kept, torn._named = page._kept, list(page._named)
            with pytest.raises(Stopped):  # the bytes are there, the record is not
                torn.keep(step, rng.randbytes(rng.randrange(1, 400)))
            assert [page.kept(old) for old, _ in written[-3:]] == [old for _, old in written[-3:]]
            assert page.kept(step) is None
            write_contents(page, before)
            if rng.random() < 0.5:
                data = rng.randbytes(rng.randrange(1, 400))
            page.keep(step, data)
            written.append((step, data))
            assert [page.kept(old) for old, _ in written[-4:]] == [old for _, old in written[-4:]]
    finally:
        torn.close()


@pytest.mark.parametrize("offset", [0, 8, 40, 4000])
def test_damage_in_an_area_is_noticed(page: Page, offset: int) -> None:
    page.keep(5, small_state(5, 0, 8000))
    assert page.kept(5) is not None
    page._map[pages.HEADER_BYTES + offset] ^= 0x40
    assert page.kept(5) is None


@pytest.mark.parametrize("word", range(pages._RECORD_WORDS))
@pytest.mark.parametrize("bit", [0, 6, 40, 63])
def test_damage_in_a_record_is_noticed(page: Page, word: int, bit: int) -> None:
    page.keep(5, small_state(5, 0, 8000))
    index = pages._RECORDS + pages._RECORD_WORDS + word
    flipped = (page._words[index] & (2**64 - 1)) ^ (1 << bit)
    page._words[index] = flipped - 2**64 if flipped >= 2**63 else flipped
    found = page.kept(5)
    # A sequence number that is damaged only changes which copy is the newer one.
    assert found is None or (word == 0 and found == small_state(5, 0, 8000))


def test_the_same_state_is_not_written_again(page: Page) -> None:
    data = small_state(1, 0, 8000)
    for step in range(1, 12):
        page.keep(step, data)
    assert {record[2] for record in records_of(page)} == {0}
    assert [page.kept(step) == data for step in range(7, 12)] == [False] + [True] * 4


def test_the_newest_of_two_states_of_one_step_counts(page: Page) -> None:
    page.keep(3, b"before the gradients left")
    page.keep(3, b"at the commit")
    assert page.kept(3) == b"at the commit"
    assert page.kept(2) is None and page.kept(4) is None


def test_a_state_may_be_empty_and_may_be_too_large(page: Page) -> None:
    assert page.keep(1, b"") and page.kept(1) == b""
    assert not page.keep(2, bytes(pages.MAX_SMALL_BYTES + 1))
    assert page.kept(2) is None and page.kept(1) == b""


def test_what_is_written_is_read_through_another_mapping(page: Page) -> None:
    before_ns = time.monotonic_ns()
    reader = Page(os.dup(page.fd))
    try:
        fresh = reader.read()
        assert (fresh.generation, fresh.step, fresh.persisted_step) == (-1, 0, None)
        assert fresh.activity is Activity.STARTING and fresh.commit_ns == 0
        page.enter(4)
        page.act(Activity.TRAINING)
        page.commit(17)
        page.set_persisted(10)
        page.mark_fault(2)
        page.tick()
        page.tick()
        page.enter_section("evaluate", 5_000)
        seen = reader.read()
        assert (seen.generation, seen.step, seen.ticks) == (4, 17, 2)
        assert (seen.activity, seen.section) == (Activity.SECTION, "evaluate")
        assert (seen.section_timeout_ns, seen.persisted_step) == (5_000, 10)
        assert seen.drills_fired == 0b100
        assert before_ns <= seen.commit_ns <= seen.fault_ns <= seen.progress_ns
        page.leave_section(Activity.TRAINING)
        left = reader.read()
        assert (left.activity, left.section, left.section_timeout_ns) == (Activity.TRAINING, "", 0)
    finally:
        reader.close()


def test_a_long_name_of_a_section_is_cut_and_never_breaks_the_reader(page: Page) -> None:
    page.enter_section("é" * 500, 0)
    name = page.read().section
    assert name.startswith("é" * 60) and len(name.encode()) <= pages._NAME_BYTES + 2


def test_an_unknown_activity_is_no_error(page: Page) -> None:
    page._words[pages._ACTIVITY] = 99
    assert page.read().activity is Activity.STARTING


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        page = Page.create("leak")
        page.keep(1, b"x")
        page.read()
        page.kept(1)
        page.close()
    assert len(os.listdir("/proc/self/fd")) == before
