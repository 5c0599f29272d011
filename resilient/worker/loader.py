"""Data workers: processes that load parts ahead, and outlive the generation.

The one idea: a data worker is handed everything that a part depends on (its samples, and a seed
from (seed, step, part)), so it does not matter which one loads it, in which generation, or whether
it is the first to try: what it draws depends neither on the world nor on faults.

They are torch's DataLoader's, used again by the next generation. What torch does otherwise, and why
not here:

* its SIGCHLD handler raises at any bytecode of the main thread: the disposition is put back;
* it looks for dead data workers every 5 s, and reads from their pipe without a bound: we wait for
  the pipe and for the processes at once, and read only what is there;
* a dead one is an error: we make new ones and ask again for what is missing. All of them, because
  the one that died may have held the lock of the pipe that they share.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from resilient.worker.order import Dealing, Request

log = logging.getLogger("resilient")

MAX_DEATHS = 3
"""Data workers that may die over one and the same part before it counts as the data set's fault."""

_POLL_MS = 10  # how often a wait for data looks whether the generation was aborted
_PR_SET_PDEATHSIG = 1
_JOIN_TIMEOUT_S = 5.0  # of a process that was sent SIGKILL


class Loading:
    """How samples become a part; also the data set that torch's DataLoader is given."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._get_many = getattr(dataset, "__getitems__", None)

    def is_same(self, other: Loading) -> bool:
        return self.dataset is other.dataset and self.collate_fn == other.collate_fn

    def load(self, indices: list[int]) -> Any:
        if self._get_many is not None:
            samples = self._get_many(indices)
        else:
            dataset = self.dataset
            samples = [dataset[index] for index in indices]
        return self.collate_fn(samples)

    def __getitem__(self, request: Request) -> bytes:
        """In a data worker: (step, part, collated part or _Raised), pickled.

        Pickled here, because what fails to pickle in the queue's own thread is lost without a word,
        and the rank would wait for it for ever. Tensors travel in shared memory all the same.
        """
        _seed_all(request.seed)
        try:
            answer = request.step, request.part, self.load(request.indices)
            return bytes(ForkingPickler.dumps(answer))
        except Exception as error:
            text = traceback.format_exc()
            try:  # as it is, so that the train function sees what it would see without data workers
                data = pickle.dumps(_Raised(error, text))
                pickle.loads(data)
            except Exception:
                told = RuntimeError(f"{type(error).__qualname__} in a data worker: {error}")
                data = pickle.dumps(_Raised(told, text))
            return pickle.dumps((request.step, request.part, pickle.loads(data)))


class _Raised:
    def __init__(self, error: Exception, text: str) -> None:
        self.error = error
        self.text = text


class _DataWorkerTraceback(Exception):
    """The traceback in the data worker, as the cause of the exception here."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def _seed_all(seed: int) -> None:
    random.seed(seed)
    # Not torch.manual_seed: in a process without an initialised device it queues a call each time.
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


# ---------------------------------------------------------------- data workers


class _DataWorkerDied(Exception):
    """Which, and how."""


class Loader:
    """The data workers of one data set, and what was asked of them.

    Requests are made ahead, in the order in which they will be needed; when something else is
    needed (another generation, another world), the stream of requests starts anew.
    """

    def __init__(self, loading: Loading, num_workers: int) -> None:
        self.loading = loading
        self.num_workers = num_workers
        self._requests: Iterator[Request] = iter(())
        self._dealing: Dealing | None = None  # of the requests
        self._outstanding: deque[tuple[int, int]] = deque()  # (step, part), the next one first
        self._loader: DataLoader[Any] | None = None
        self._stream: _InterruptibleIter | None = None

    @property
    def pids(self) -> list[int]:
        """Of the data workers; empty before the first request."""
        return [] if self._stream is None else [int(w.pid or 0) for w in self._stream._workers]

    def get(
        self,
        step: int,
        part: int,
        dealing: Dealing,
        check_interrupted: Callable[[], object] | None,
    ) -> Any:
        """That part, collated; what the rank needs after it is asked for ahead.

        Raises:
            What the data set raised; RuntimeError when data workers die over this part again and
            again.
        """
        for attempt in range(1, MAX_DEATHS + 1):
            try:
                if self._dealing is not dealing or not self._is_next(step, part):
                    self._restart(step, part, dealing, check_interrupted)
                return self._next(check_interrupted)
            except _DataWorkerDied as died:
                self.close()
                if attempt == MAX_DEATHS:
                    raise RuntimeError(
                        f"data workers died {attempt} times while loading part {part} of step "
                        f"{step}; the last one: {died}. Try num_workers=0 to see what happens, and "
                        "look for a lack of memory"
                    ) from None
                log.warning("%s; it is replaced, and loading goes on at step %d", str(died), step)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Ends the data workers, whatever they are doing."""
        stream, self._stream, self._loader = self._stream, None, None
        self._dealing = None
        self._requests = iter(())
        self._outstanding.clear()
        if stream is not None:
            stream.kill()

    def _is_next(self, step: int, part: int) -> bool:
        return bool(self._outstanding) and self._outstanding[0] == (step, part)

    def _restart(
        self,
        step: int,
        part: int,
        dealing: Dealing,
        check_interrupted: Callable[[], object] | None,
    ) -> None:
        self._dealing = None  # until it has worked
        self._requests = dealing.requests(step, part)
        self._outstanding.clear()
        if self._stream is None:
            self._start()
        else:
            assert self._loader is not None
            try:
                with self._stream.interruptible(check_interrupted):
                    iter(self._loader)  # waits until the workers are done with the old requests
            except _DataWorkerDied:
                raise
            except BaseException:
                self.close()  # broken off half way: answers would be taken for others
                raise
        self._dealing = dealing

    def _start(self) -> None:
        before = signal.getsignal(signal.SIGCHLD)
        had_handler = signal_handling._SIGCHLD_handler_set
        is_main = threading.current_thread() is threading.main_thread()
        self._loader = _PartLoader(
            self.loading,
            self,
            num_workers=self.num_workers,
            # The kernel sends it when the thread that forked ends: only the main thread lasts.
            worker_init_fn=functools.partial(_init_data_worker, os.getpid() if is_main else None),
        )
        try:
            stream = iter(self._loader)
        finally:
            if is_main and before is not None:
                signal.signal(signal.SIGCHLD, before)
                signal_handling._SIGCHLD_handler_set = had_handler
        assert isinstance(stream, _InterruptibleIter)
        self._stream = stream

    def __iter__(self) -> Iterator[Request]:
        """The requests, for the DataLoader, which takes this for its sampler."""
        for request in self._requests:
            self._outstanding.append((request.step, request.part))
            yield request

    def _next(self, check_interrupted: Callable[[], object] | None) -> Any:
        assert self._stream is not None
        with self._stream.interruptible(check_interrupted):
            answer = next(self._stream)
        try:
            step, part, data = ForkingPickler.loads(answer)
        except (OSError, EOFError):
            # A tensor's memory is handed over by the data worker, which may be dying.
            self._stream.raise_dead(timeout_ms=1000)
            raise
        assert (step, part) == self._outstanding.popleft()
        if isinstance(data, _Raised):
            raise data.error from _DataWorkerTraceback(data.text)
        return data


class _PartLoader(DataLoader):
    """One item is one part; torch neither samples nor collates."""

    def __init__(self, loading: Loading, requests: Any, **options: Any) -> None:
        super().__init__(
            loading,  # type: ignore[arg-type]
            batch_size=None,
            sampler=requests,
            collate_fn=_as_it_is,
            persistent_workers=True,
            generator=torch.Generator(),  # or it would draw from the training's random numbers
            **options,
        )

    def _get_iterator(self) -> Any:
        return _InterruptibleIter(self)


class _InterruptibleIter(_MultiProcessingDataLoaderIter):
    """Waits for data, for the death of a data worker and for an abort at once."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._received = bytearray()
        self._check_interrupted: Callable[[], object] | None = None
        self._deaths = select.poll()
        self._arrivals = select.poll()
        self._pidfds: dict[int, Any] = {}
        super().__init__(loader)
        # Whatever handler is there for SIGCHLD, it need not know our processes.
        signal_handling._remove_worker_pids(id(self))
        self._worker_pids_set = False
        results: Any = self._worker_result_queue  # its parts are private to multiprocessing
        self._results = results
        self._result_fd = results._reader.fileno()
        self._arrivals.register(self._result_fd, select.POLLIN)
        for worker in self._workers:
            # Not Process.sentinel: a process that the data worker forked would hold it open.
            pidfd = os.pidfd_open(int(worker.pid or 0))
            self._pidfds[pidfd] = worker
            self._arrivals.register(pidfd, select.POLLIN)
            self._deaths.register(pidfd, select.POLLIN)

    @contextlib.contextmanager
    def interruptible(self, check_interrupted: Callable[[], object] | None) -> Iterator[None]:
        """Waits inside end with what check_interrupted raises."""
        self._check_interrupted = check_interrupted
        try:
            yield
        finally:
            self._check_interrupted = None  # it belongs to a generation, this does not

    def _try_get_data(self, timeout: float = 0.0) -> tuple[bool, Any]:
        """Called in a loop until it has something."""
        message = self._take_message()
        if message is None:
            if self._check_interrupted is not None:
                self._check_interrupted()
            ready = {fd for fd, _ in self._arrivals.poll(_POLL_MS)}
            if self._result_fd in ready:
                # A read after poll() does not block, however little of a message is there.
                self._received += os.read(self._result_fd, 1 << 20)
            elif ready:
                self.raise_dead(timeout_ms=0)
            return False, None
        self._results._sem.release()
        return True, pickle.loads(message)

    def _take_message(self) -> bytes | None:
        """The next whole message that was received (framed as multiprocessing's Connection)."""
        buffer, head = self._received, 4
        if len(buffer) < head:
            return None
        size = int.from_bytes(buffer[:4], "big", signed=True)
        if size == -1:
            head = 12
            if len(buffer) < head:
                return None
            size = int.from_bytes(buffer[4:12], "big")
        if len(buffer) < head + size:
            return None
        message = bytes(memoryview(buffer)[head : head + size])
        del buffer[: head + size]
        return message

    def raise_dead(self, timeout_ms: int) -> None:
        """Raises _DataWorkerDied if one has died, or does within that time."""
        for pidfd, _ in self._deaths.poll(timeout_ms):
            worker = self._pidfds[pidfd]
            worker.join(1)
            code = worker.exitcode  # None where somebody else has reaped it
            how = (
                f"killed by signal {-code}"
                if code is not None and code < 0
                else f"exit code {code}"
            )
            raise _DataWorkerDied(f"data worker {worker.pid} died ({how})")

    def kill(self) -> None:
        """Ends the processes at once. Not torch's way, which may wait for a lock of a dead one."""
        self._shutdown = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(_JOIN_TIMEOUT_S)
        for queue in [*self._index_queues, self._worker_result_queue]:
            queue.cancel_join_thread()
            queue.close()
        self._close_pidfds()

    def _close_pidfds(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = {}

    def __del__(self) -> None:
        self._close_pidfds()
        super().__del__()


def _as_it_is(part: Any) -> Any:
    return part


def _init_data_worker(parent_pid: int | None, worker_id: int) -> None:
    """Runs in the new data worker: it is not to outlive its rank."""
    if parent_pid is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class LoaderCache:
    """Keeps data workers from one generation to the next. One a process.

    The same data set object, collate_fn and number of workers get the same processes again. A new
    data set object gets new ones, and ends those that nobody uses of a data set of its class.
    """

    def __init__(self) -> None:
        self._loaders: list[tuple[Loader, weakref.ref[Any] | None]] = []

    def claim(self, loading: Loading, num_workers: int, user: Any) -> Loader:
        """A loader that is `user`'s until that is gone, or until reclaim()."""
        free = [entry for entry in self._loaders if entry[1] is None or entry[1]() is None]
        for entry in free:
            loader = entry[0]
            if loader.num_workers == num_workers and loader.loading.is_same(loading):
                self._loaders[self._loaders.index(entry)] = (loader, weakref.ref(user))
                return loader
        for entry in free:
            if type(entry[0].loading.dataset) is type(loading.dataset):
                self._loaders.remove(entry)
                entry[0].close()
        loader = Loader(loading, num_workers)
        self._loaders.append((loader, weakref.ref(user)))
        return loader

    def reclaim(self) -> None:
        """A generation has ended: its batches, even if somebody still holds them, are over."""
        self._loaders = [(loader, None) for loader, _ in self._loaders]

    def close(self) -> None:
        """Ends all data workers."""
        for loader, _ in self._loaders:
            loader.close()
        self._loaders = []


process_loaders = LoaderCache()
