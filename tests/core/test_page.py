"""The progress page: what one process writes another reads, and no kill makes it lie."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections.abc import Iterator

import pytest

from resilient import page as pages
from resilient.page import Activity, Page


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create("test")
    yield made
    made.close()


def small_state(step: int, kind: int, size: int) -> bytes:
    """Content that says which step it belongs to, all over; sizes differ from write to write."""
    word = step.to_bytes(6, "little") + bytes([kind, 0xA5])
    return word * (size // 8 + (step * 7 + kind) % 50)


def write_for_ever(page: Page, size: int) -> None:
    """As a worker does: the RNG before the gradients leave, all of it at the commit."""
    step = 0
    while True:
        step += 1
        page.keep(step, small_state(step, 0, size))
        page.keep(step, small_state(step, 1, size))
        page.commit(step)


def kill_a_writer(page: Page, size: int, rng: random.Random) -> int:
    """Runs a writer, kills it at some moment after a few steps; returns its committed steps."""
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(page, size)
        finally:
            os._exit(1)
    wanted = 2 + rng.randrange(4)
    deadline_s = time.monotonic() + 20
    while page.read().step < wanted:
        assert time.monotonic() < deadline_s, f"the writer got to {page.read().step} of {wanted}"
        time.sleep(0.0002)
    time.sleep(rng.uniform(0, 0.002))  # any moment will do
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    return page.read().step


def num_torn(page: Page) -> int:
    """Areas that a kill left half written."""
    torn = 0
    for index in range(pages.NUM_AREAS):
        start = pages.HEADER_BYTES + index * pages.AREA_BYTES
        with memoryview(page._map)[start : start + pages.AREA_HEADER_BYTES].cast("q") as area:
            sequence, _, length, checksum = area
        body = start + pages.AREA_HEADER_BYTES
        torn += sequence == 0 or zlib.crc32(page._map[body : body + length]) != checksum
    return torn


@pytest.mark.parametrize("size", [200, 1_000_000], ids=["small", "large"])
def test_a_writer_that_is_killed_at_any_moment_leaves_its_last_two_steps(size: int) -> None:
    rng = random.Random(size)
    torn = 0
    for _ in range(25):
        page = Page.create("victim")
        try:
            step = kill_a_writer(page, size, rng)
            torn += num_torn(page)
            for kept_step in range(max(0, step - 5), step + 3):
                data = page.kept(kept_step)
                right = {small_state(kept_step, kind, size) for kind in (0, 1)}
                assert data is None or data in right, f"wrong bytes for step {kept_step}"
            assert page.kept(step) == small_state(step, 1, size), f"step {step} is lost"
            # The one before may still be asked for until the next one's gradients have left, that
            # is, until the next step is kept too: by then every rank has committed this one.
            before = page.kept(step - 1)
            assert before == small_state(step - 1, 1, size) or page.kept(step + 1) is not None
        finally:
            page.close()
    if size > 100_000:
        assert torn > 3, "too few kills fell into a write: this test shows nothing"


@pytest.mark.parametrize("offset", [0, 8, 16, 24, 40, 4000])
def test_damage_anywhere_in_an_area_is_noticed(page: Page, offset: int) -> None:
    page.keep(5, small_state(5, 0, 8000))
    start = pages.HEADER_BYTES + (1 % pages.NUM_AREAS) * pages.AREA_BYTES
    assert page.kept(5) is not None
    page._map[start + offset] ^= 0x40
    found = page.kept(5)
    # A sequence number that is damaged only changes which copy is the newer one.
    assert found is None or (offset == 0 and found == small_state(5, 0, 8000))


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
