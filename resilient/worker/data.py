"""The batches a training loop asks for: this rank's parts of each global batch, and the cursor.

The one idea: the state is one number, how many global batches were consumed; `core.batches` says
what follows from it. So a loop that is entered again, at any world size, goes on where it was.

Who loads the parts is `loader`'s affair; which samples they are made of, `order`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch.utils.data import IterableDataset, default_collate

from resilient.core.batches import Deal, Part
from resilient.errors import ConfigError
from resilient.worker.loader import Loader, LoaderCache, Loading, process_loaders
from resilient.worker.order import Dealing


class Hooks(Protocol):
    """What the batches tell the job."""

    def ask(self) -> None:
        """The next batch, or the end, was asked for: commits, refuses, or raises Interrupted."""

    def part(
        self, index: int, is_last: bool, num_samples: int, num_total: int, num_previous: int, /
    ) -> None:
        """A part is about to be given to the loop.

        index: among this rank's parts; num_previous: samples of the one before it, 0 for the first.
        A rank without a part in this batch says so once: (0, True, 0, num_total, 0).
        """


class Batch:
    """One global batch: iterate for this rank's parts of it, as often as needed; maybe none.

    Attributes:
        step: how many global batches came before it.
        num_samples: of the whole global batch, over all ranks.
    """

    def __init__(self, batches: Batches, step: int, num_samples: int, parts: tuple[Part, ...]):
        self.step = step
        self.num_samples = num_samples
        self._batches = batches
        self._parts = parts
        self._loaded: list[Any] = []

    def __len__(self) -> int:
        """Parts of it on this rank."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return self._batches._hand_out(self)


class Batches:
    """Iterator over the global batches of a job, from wherever it is restored to."""

    def __init__(
        self,
        dataset: Any,
        *,
        job_hooks: Hooks,
        rank: int,
        world_size: int,
        global_batch_size: int,
        num_parts: int | None = None,
        default_num_parts: int | None = None,
        epochs: int | None = 1,
        max_steps: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        check_interrupted: Callable[[], object] | None = None,
        loaders: LoaderCache | None = None,
    ) -> None:
        """
        Args:
            num_parts: fixed for the job; None: that of the state that is loaded, else the default.
            default_num_parts: None: world_size.
            check_interrupted: called again and again while data is waited for; raises to end the
                wait. None: the hooks' own, if they have one.
            loaders: where data workers are kept between generations; None: one a process.
        Raises:
            ConfigError: the numbers do not fit together, or the data set is not map-style.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                "job.batches needs a map-style data set (__len__ and __getitem__), not "
                f"{type(dataset).__name__}: an iterable one cannot be resumed at a sample"
            )
        try:
            num_samples = len(dataset)
        except TypeError:
            raise ConfigError(
                f"job.batches: the data set {type(dataset).__name__} has no length: give it a "
                "__len__"
            ) from None
        if not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigError(f"num_workers must be 0 or more, not {num_workers!r}")
        self._may_adopt_parts = num_parts is None
        if num_parts is None:
            num_parts = world_size if default_num_parts is None else default_num_parts
        self.deal = Deal(num_samples, global_batch_size, num_parts, epochs, max_steps, drop_last)
        # Whether the default fits is asked when it is used: a state may bring another number.
        self._is_checked = not self._may_adopt_parts
        (self.deal if self._is_checked else replace(self.deal, num_parts=1)).check()
        self._hooks = job_hooks
        self._dealing = Dealing(self.deal, rank, world_size, shuffle, seed)
        self._consumed = 0
        self._fingerprint = {
            "num_samples": num_samples,
            "global_batch_size": global_batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self._check_interrupted = check_interrupted or getattr(job_hooks, "check_interrupted", None)
        self._handed_out: Callable[[], None] | None = getattr(job_hooks, "handed_out", None)
        self._begin_parts: Callable[[int, int], None] | None
        self._begin_parts = getattr(job_hooks, "begin_parts", None)
        self._end_parts: Callable[[], None] | None = getattr(job_hooks, "end_parts", None)
        self._loading = Loading(dataset, collate_fn or default_collate)
        self._loader: Loader | None = None
        if num_workers > 0:
            cache = loaders if loaders is not None else process_loaders
            self._loader = cache.claim(self._loading, num_workers, self)

    def __len__(self) -> int:
        """Global batches of the whole job."""
        return self.deal.num_steps

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        self._hooks.ask()
        if not self._is_checked:
            self.deal.check()
            self._is_checked = True
        step = self._consumed
        if step >= self.deal.num_steps:
            raise StopIteration
        span = self.deal.batch(step)
        parts = self.deal.parts(span, self._dealing.rank, self._dealing.world_size)
        self._consumed = step + 1
        if self._handed_out is not None:
            self._handed_out()
        return Batch(self, step, span.num_samples, parts)

    def state_dict(self) -> dict[str, Any]:
        """consumed, the global batches handed out; the rest says of what."""
        return {
            "consumed": self._consumed,
            "num_parts": self.deal.num_parts,
            **self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where that state was.

        Raises:
            ConfigError: it is of other data, or of another order; says what differs.
        """
        mine = self._fingerprint
        theirs = {name: state.get(name) for name in mine}
        if mine != theirs:
            changed = ", ".join(
                f"{name} was {theirs[name]!r} and is {mine[name]!r}"
                for name in mine
                if mine[name] != theirs[name]
            )
            raise ConfigError(
                f"job.batches cannot go on from the saved position: {changed}; samples would be "
                "skipped or repeated. Use the same values, or start without the old state"
            )
        self._consumed = int(state["consumed"])
        num_parts = int(state["num_parts"])
        if self._may_adopt_parts and num_parts != self.deal.num_parts:
            self.deal = replace(self.deal, num_parts=num_parts)
            self._dealing = replace(self._dealing, deal=self.deal)

    # ------------------------------------------------------------ parts

    def _hand_out(self, batch: Batch) -> Iterator[Any]:
        parts, hooks = batch._parts, self._hooks
        if self._begin_parts is not None:
            span = self.deal.batch(batch.step)
            self._begin_parts(self.deal.num_parts_of(span), len(parts))
        if not parts:
            hooks.part(0, True, 0, batch.num_samples, 0)
        previous = 0
        for index, part in enumerate(parts):
            if index == len(batch._loaded):
                batch._loaded.append(self._load(batch.step, part))
            num_samples = part.num_samples
            hooks.part(index, index == len(parts) - 1, num_samples, batch.num_samples, previous)
            previous = num_samples
            yield batch._loaded[index]
        if self._end_parts is not None:
            self._end_parts()

    def _load(self, step: int, part: Part) -> Any:
        if self._loader is None:
            return self._loading.load(self._dealing.indices(step, part))
        return self._loader.get(step, part.number, self._dealing, self._check_interrupted)
