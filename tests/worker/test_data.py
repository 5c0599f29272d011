"""Batches: every sample once, from any cursor; data workers that die, linger or are interrupted."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from resilient.errors import ConfigError, Interrupted
from resilient.worker.data import Batches
from resilient.worker.loader import MAX_DEATHS, LoaderCache

torch.set_num_threads(1)


class Hooks:
    """Records what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def ask(self) -> None:
        self.calls.append("ask")

    def part(self, *what: Any) -> None:
        self.calls.append(what)


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Random(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.randint(1 << 30, (1,)).item(), random.getrandbits(30)])


class Waiting(Numbers):
    """Loads at once, except for samples from `slow` on: those take for ever."""

    def __init__(self, count: int, slow: int) -> None:
        super().__init__(count)
        self.slow = slow

    def __getitem__(self, index: int) -> int:
        while index >= self.slow:
            time.sleep(60)
        return index


class CustomError(Exception):
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index


class Raising(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise CustomError(index, "bad sample")
        return index


class Deadly(Numbers):
    """Kills the process that loads sample 5: the first `deaths` times, counted in a file."""

    def __init__(self, count: int, counter: Path, deaths: int, how: str = "kill") -> None:
        super().__init__(count)
        self.counter, self.deaths, self.how = counter, deaths, how

    def __getitem__(self, index: int) -> int:
        if index == 5 and len(self.counter.read_bytes()) < self.deaths:
            with self.counter.open("ab") as file:
                file.write(b"x")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class BigTexts(Numbers):
    """Larger than a pipe: a message is received in pieces."""

    def __getitem__(self, index: int) -> str:
        return f"{index}:" + "x" * 300_000


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.fixture
def cache():
    others = children()  # servers of other tests
    loaders = LoaderCache()
    yield loaders
    loaders.close()
    assert children() <= others


def children() -> set[int]:
    """Of this process, ended ones that nobody has waited for included."""
    return {child.pid for child in psutil.Process().children()}


def make(dataset: Any, hooks: Hooks | None = None, **options: Any) -> Batches:
    options = {"rank": 0, "world_size": 1, "global_batch_size": 8, "collate_fn": as_list} | options
    return Batches(dataset, job_hooks=hooks or Hooks(), **options)


def flat(batches: Batches) -> list[Any]:
    return [sample for batch in batches for part in batch for sample in part]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# ---------------------------------------------------------------- order, cursor, parts


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_sample_once_an_epoch(cache, num_workers, drop_last):
    batches = make(
        Numbers(29), epochs=2, drop_last=drop_last, num_workers=num_workers, loaders=cache
    )
    samples = flat(batches)
    per_epoch = 24 if drop_last else 29
    assert len(samples) == 2 * per_epoch
    for epoch in (samples[:per_epoch], samples[per_epoch:]):
        assert len(set(epoch)) == per_epoch
    assert samples[:per_epoch] != samples[per_epoch:]
    assert len(batches) == (6 if drop_last else 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_world_that_changes_sees_the_same_global_batches(cache, num_workers):
    whole = [
        sorted(sample for part in batch for sample in part)
        for batch in make(Numbers(50), num_parts=4, epochs=2, drop_last=False)
    ]
    cursor, seen = 0, []
    for world_size, num_steps in ((4, 3), (3, 2), (1, 1), (5, 4), (2, 4)):
        states = []
        shares: list[list[Any]] = [[] for _ in range(num_steps)]
        for rank in range(world_size):
            batches = make(
                Numbers(50),
                rank=rank,
                world_size=world_size,
                num_parts=4,
                epochs=2,
                drop_last=False,
                num_workers=num_workers,
                loaders=cache,
            )
            batches.load_state_dict({**batches.state_dict(), "consumed": cursor})
            for step, batch in zip(range(num_steps), batches, strict=False):
                assert batch.step == cursor + step
                shares[step] += [sample for part in batch for sample in part]
            states.append(batches.state_dict()["consumed"])
            cache.close()
        assert states == [cursor + num_steps] * world_size
        cursor += num_steps
        seen += [sorted(share) for share in shares]
    assert seen == whole


def test_order_without_shuffle_and_by_seed():
    assert flat(make(Numbers(16), shuffle=False)) == list(range(16))
    assert flat(make(Numbers(16), seed=1)) == flat(make(Numbers(16), seed=1))
    assert flat(make(Numbers(16), seed=1)) != flat(make(Numbers(16), seed=2))


def test_the_default_order_is_the_one_it_always_was():
    assert flat(make(Numbers(8))) == FIRST_ORDER


def test_what_the_hooks_are_told_and_when():
    hooks = Hooks()
    # 11 samples: one batch of 4 parts of 2, and a short one of parts of 2 and 1
    batches = make(Numbers(11), hooks, world_size=3, rank=0, num_parts=4, drop_last=False, epochs=1)
    for batch in batches:
        for _ in batch:
            hooks.calls.append("trained")
    assert hooks.calls == [
        "ask",
        (0, False, 2, 8, 0),
        "trained",
        (1, True, 2, 8, 2),
        "trained",
        "ask",
        (0, True, 2, 3, 0),
        "trained",
        "ask",
    ]
    hooks = Hooks()
    for batch in make(
        Numbers(11), hooks, world_size=3, rank=2, num_parts=4, drop_last=False, epochs=1
    ):
        assert len(list(batch)) == len(batch)
    assert hooks.calls == ["ask", (0, True, 2, 8, 0), "ask", (0, True, 0, 3, 0), "ask"]


def test_a_batch_can_be_iterated_again_and_gives_the_same():
    hooks = Hooks()
    batches = make(Random(32), hooks, num_parts=2)
    for batch in batches:
        hooks.calls.clear()
        first, second = list(batch), list(batch)
        assert len(batch) == 2 and batch.num_samples == 8
        assert all(
            a is b
            for one, two in zip(first, second, strict=True)
            for a, b in zip(one, two, strict=True)
        )
        assert hooks.calls == 2 * [(0, False, 4, 8, 0), (1, True, 4, 8, 4)]


def test_default_collate_and_getitems():
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    [batch] = list(make(Many(8), shuffle=False, collate_fn=None))
    assert [part.tolist() for part in batch] == [[0, -1, -2, -3, -4, -5, -6, -7]]


def test_a_batch_that_is_not_looked_at_is_passed_over(cache):
    batches = make(Numbers(32), shuffle=False, num_workers=2, loaders=cache)
    got = []
    for batch in batches:
        if batch.step != 1:
            got += [sample for part in batch for sample in part]
    assert got == [*range(8), *range(16, 32)]


def test_the_cursor_counts_batches_handed_out_when_asked_for_the_next():
    states = []

    class Asking(Hooks):
        def ask(self) -> None:
            states.append(batches.state_dict()["consumed"])

    batches = make(Numbers(24), Asking())
    flat(batches)
    assert states == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"global_batch_size": 4}, "global_batch_size"),
        ({"drop_last": False}, "drop_last"),
    ],
)
def test_a_cursor_of_another_order_is_refused(change, word):
    state = make(Numbers(24)).state_dict()
    with pytest.raises(ConfigError, match=f"{word} was .* and is"):
        make(Numbers(24), **change).load_state_dict(state)
    with pytest.raises(ConfigError, match="num_samples was 24 and is 25"):
        make(Numbers(25)).load_state_dict(state)


def test_what_is_no_map_style_data_set_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class NoLength(Dataset):
        def __getitem__(self, index: int) -> int:
            return index

    for dataset, words in ((Stream(), "map-style"), (NoLength(), "no length")):
        with pytest.raises(ConfigError, match=words):
            make(dataset)
    with pytest.raises(ConfigError, match="num_workers"):
        make(Numbers(8), num_workers=-1)


# ---------------------------------------------------------------- data workers


def test_tensors_and_messages_larger_than_the_pipe_arrive_whole(cache):
    batches = make(BigTexts(16), shuffle=False, num_workers=2, loaders=cache)
    assert [text.split(":")[0] for text in flat(batches)] == [str(i) for i in range(16)]
    batches = make(Random(16), shuffle=False, num_workers=2, loaders=cache, collate_fn=None)
    assert [row[0].item() for row in flat(batches)] == list(range(16))


def test_what_is_drawn_in_data_workers_depends_on_the_part_only(cache):
    def drawn(**options: Any) -> list[Any]:
        batches = make(Random(32), num_parts=4, loaders=cache, **options)
        samples = [tuple(sample.tolist()) for sample in flat(batches)]
        cache.close()
        return sorted(samples)

    one = drawn(num_workers=1)
    assert one == drawn(num_workers=3)
    two_ranks = drawn(num_workers=1, world_size=2, rank=0) + drawn(
        num_workers=2, world_size=2, rank=1
    )
    assert one == sorted(two_ranks)
    assert len({sample[1] for sample in one}) > 30


def test_data_workers_leave_the_random_numbers_of_the_training_alone(cache):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    flat(make(Random(32), num_workers=2, loaders=cache))
    assert torch.equal(torch.rand(3), expected)


def test_data_workers_are_used_again_by_the_next_generation(cache):
    dataset = Numbers(64)
    batches = make(dataset, num_workers=2, loaders=cache)
    next(iter(next(batches)))
    pids = batches._loader.pids
    state = batches.state_dict()
    del batches
    again = make(dataset, num_workers=2, loaders=cache, world_size=2, rank=1, num_parts=4)
    again.load_state_dict(state)
    expected = make(dataset, world_size=2, rank=1, num_parts=4)
    expected.load_state_dict(state)
    assert flat(again) == flat(expected)
    assert again._loader.pids == pids
    assert len(set(pids)) == 2

    held = again  # something still holds it; the generation is over all the same
    other = make(dataset, num_workers=2, loaders=cache)
    assert other._loader is not held._loader
    cache.reclaim()
    assert make(dataset, num_workers=2, loaders=cache)._loader in (held._loader, other._loader)


def test_a_new_data_set_ends_the_data_workers_of_the_old_one(cache):
    batches = make(Numbers(64), num_workers=2, loaders=cache)
    next(iter(next(batches)))
    pids = batches._loader.pids
    del batches
    batches = make(Numbers(64), num_workers=2, loaders=cache)
    assert not any(is_running(pid) for pid in pids)
    assert len(flat(batches)) == 64


def test_nothing_of_a_generation_is_held_by_the_loader(cache):
    import weakref

    hooks = Hooks()
    dataset = Numbers(64)
    batches = make(dataset, hooks, num_workers=1, loaders=cache, check_interrupted=hooks.calls.copy)
    next(iter(next(batches)))
    gone = weakref.ref(batches), weakref.ref(hooks)
    del batches, hooks
    assert [ref() for ref in gone] == [None, None]  # by reference counts alone


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_dead_data_worker_is_replaced_at_the_cursor(cache, tmp_path, how, caplog):
    counter = tmp_path / "deaths"
    counter.touch()
    before = signal.getsignal(signal.SIGCHLD)
    batches = make(
        Deadly(64, counter, 1, how), shuffle=False, num_parts=4, num_workers=2, loaders=cache
    )
    start_s = time.monotonic()
    assert flat(batches) == list(range(64))
    assert time.monotonic() - start_s < 3
    assert counter.read_bytes() == b"x"
    assert signal.getsignal(signal.SIGCHLD) is before
    assert ("signal 9" if how == "kill" else "exit code 3") in caplog.text


def test_idle_data_workers_that_are_killed_are_replaced(cache):
    batches = make(Numbers(640), shuffle=False, num_workers=2, loaders=cache)
    samples = []
    for batch in batches:
        samples += [sample for part in batch for sample in part]
        if batch.step in (3, 7):
            for pid in batches._loader.pids:
                os.kill(pid, signal.SIGKILL)
    assert samples == list(range(640))


def test_a_data_worker_killed_half_way_through_a_message_is_replaced(cache):
    """It holds the lock of the pipe then, and the message never ends."""
    batches = make(BigTexts(64), shuffle=False, num_parts=8, num_workers=2, loaders=cache)
    seen = []
    for batch in batches:
        for part in batch:
            seen += [int(text.split(":")[0]) for text in part]
        if batch.step == 1:
            # The next ones are on their way and fill the pipe; nobody reads.
            fd = batches._loader._stream._result_fd
            wait_until(lambda fd=fd: waiting_bytes(fd) >= 60_000, "the pipe is full")
            for pid in batches._loader.pids:
                os.kill(pid, signal.SIGKILL)
    assert seen == list(range(64))


def waiting_bytes(fd: int) -> int:
    import array
    import fcntl
    import termios

    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]


def test_a_sample_that_always_kills_is_the_data_sets_fault(cache, tmp_path):
    counter = tmp_path / "deaths"
    counter.touch()
    batches = make(Deadly(64, counter, 1000), shuffle=False, num_workers=1, loaders=cache)
    with pytest.raises(RuntimeError, match=r"died 3 times .* step 0; .* signal 9"):
        flat(batches)
    assert len(counter.read_bytes()) == MAX_DEATHS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_data_set_arrives_as_it_is(cache, num_workers):
    batches = make(Raising(16), shuffle=False, num_workers=num_workers, loaders=cache)
    with pytest.raises(CustomError) as raised:
        flat(batches)
    assert raised.value.index == 5
    assert raised.value.args == (5, "bad sample")
    if num_workers:
        assert "in __getitem__" in str(raised.value.__cause__)


def test_what_cannot_be_pickled_is_an_error_and_no_hang(cache):
    class Local(ValueError):
        pass

    class Dataset(Numbers):
        def __getitem__(self, index: int) -> int:
            raise Local("lost")

    with pytest.raises(RuntimeError, match=r"Local in a data worker: lost") as raised:
        flat(make(Dataset(16), num_workers=1, loaders=cache))
    assert "in __getitem__" in str(raised.value.__cause__)
    with pytest.raises(Exception, match="pickle"):
        flat(make(Numbers(16), num_workers=1, loaders=cache, collate_fn=lambda part: lambda: part))


def test_an_abort_ends_the_wait_for_data_and_the_loader_lives_on(cache):
    dataset = Waiting(64, slow=16)
    aborted = False

    def check() -> None:
        if aborted:
            raise Interrupted

    batches = make(dataset, shuffle=False, num_workers=1, loaders=cache, check_interrupted=check)
    assert list(next(batches)) == [list(range(8))]
    assert list(next(batches)) == [list(range(8, 16))]
    stuck = next(batches)
    aborted = True
    start_s = time.monotonic()
    with pytest.raises(Interrupted):
        list(stuck)
    assert time.monotonic() - start_s < 0.5
    # The next generation waits for what the worker is busy with, and can be aborted there too.
    again = make(
        dataset, shuffle=False, num_workers=1, loaders=cache, check_interrupted=check, rank=0
    )
    cache.reclaim()
    again._loader = batches._loader
    with pytest.raises(Interrupted):
        list(next(again))
    aborted = False
    third = make(Numbers(64), shuffle=False, num_workers=1, loaders=cache)
    assert list(next(third)) == [list(range(8))]


def test_sigchld_is_as_it_was_and_a_users_handler_still_works(cache):
    seen = []

    def handler(signum: int, frame: Any) -> None:
        seen.append(signum)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        batches = make(Numbers(64), num_workers=2, loaders=cache)
        next(iter(next(batches)))
        assert signal.getsignal(signal.SIGCHLD) is handler
        for pid in batches._loader.pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(seen) > 0, "the handler was called")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_no_descriptors_threads_or_processes_are_left_behind():
    def numbers() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    others = children()
    cache = LoaderCache()
    first = None
    for _ in range(4):
        batches = make(Random(64), num_workers=2, loaders=cache, collate_fn=None)
        for batch in batches:
            list(batch)
            if batch.step == 2:
                os.kill(batches._loader.pids[0], signal.SIGKILL)
        del batch, batches
        cache.close()
        gc.collect()
        if first is None:
            first = numbers()
    wait_until(lambda: numbers() <= first, f"{numbers()} is no more than {first}")
    assert children() <= others


def test_data_workers_die_with_their_rank():
    script = textwrap.dedent(
        """
        import os, sys, time, torch
        from resilient.worker.data import Batches
        class Numbers:
            def __len__(self): return 64
            def __getitem__(self, index): return index
        class Hooks:
            def ask(self): pass
            def part(self, *what): pass
        batches = Batches(Numbers(), job_hooks=Hooks(), rank=0, world_size=1, global_batch_size=8,
                          num_workers=2)
        list(next(batches))
        print(*batches._loader.pids, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2 and all(is_running(pid) for pid in pids)
        rank.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids), "data workers are gone", 2.0)


def test_a_script_with_data_workers_ends_at_once():
    script = textwrap.dedent(
        """
        from resilient.worker.data import Batches
        class Numbers:
            def __len__(self): return 64
            def __getitem__(self, index): return index
        class Hooks:
            def ask(self): pass
            def part(self, *what): pass
        batches = Batches(Numbers(), job_hooks=Hooks(), rank=0, world_size=1, global_batch_size=8,
                          num_workers=2)
        list(next(batches))
        import time, atexit
        start = time.monotonic()
        print(start, *batches._loader.pids, flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    ended_s = time.monotonic()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    start_s, *pids = done.stdout.split()
    assert ended_s - float(start_s) < 3
    assert not any(is_running(int(pid)) for pid in pids)


FIRST_ORDER = [4, 1, 0, 7, 2, 3, 6, 5]
