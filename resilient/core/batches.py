"""Who trains on which samples: the arithmetic of global batches and their parts.

The one idea: everything is a function of how many global batches were consumed. An epoch is one
order of the samples, a global batch is the next `global_batch_size` of that order, and a part is
one of its `num_parts` equal pieces. Only who gets a part depends on the world: part p goes to rank
p mod world_size. So a world of another size deals the same parts again, and no sample is skipped
or seen twice.

Positions here are positions in the order of an epoch; the order itself (a permutation seeded with
`epoch_seed`) is made where torch is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from resilient.errors import ConfigError

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Part(NamedTuple):
    """One piece of a global batch.

    Attributes:
        number: 0..num_parts-1, within its global batch.
        start, stop: positions in the epoch's order.
    """

    number: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


class Span(NamedTuple):
    """One global batch: an epoch, and positions start..stop-1 of its order."""

    epoch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Deal:
    """How a data set is cut into global batches and parts, for the whole job.

    Attributes:
        num_samples: samples in the data set.
        global_batch_size: samples of one step, over all ranks.
        num_parts: pieces a full global batch is cut into.
        epochs: passes over the data set; None: until max_steps.
        max_steps: global batches after which it ends; None: until the epochs end.
        drop_last: leave the shorter batch at the end of an epoch out.
    """

    num_samples: int
    global_batch_size: int
    num_parts: int
    epochs: int | None = 1
    max_steps: int | None = None
    drop_last: bool = True

    def check(self) -> None:
        """Raises ConfigError where these numbers do not fit together, and says what would fit."""
        for name, value in (
            ("global_batch_size", self.global_batch_size),
            ("num_parts", self.num_parts),
            ("epochs", self.epochs),
            ("max_steps", self.max_steps),
        ):
            if value is None and name in ("epochs", "max_steps"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.epochs is None and self.max_steps is None:
            raise ConfigError("epochs=None never ends: give max_steps as well")
        if self.num_samples < 1:
            raise ConfigError("the data set is empty")
        if self.global_batch_size % self.num_parts:
            raise ConfigError(_what_fits(self.global_batch_size, self.num_parts))
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise ConfigError(
                f"the data set has {self.num_samples} samples, fewer than one global batch of "
                f"{self.global_batch_size}: lower global_batch_size, or pass drop_last=False"
            )

    @property
    def part_size(self) -> int:
        """Samples of a part; the last part of an epoch's short batch may have fewer."""
        return self.global_batch_size // self.num_parts

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    @property
    def num_steps(self) -> int:
        """Global batches of the whole job."""
        if self.epochs is None:
            assert self.max_steps is not None  # check() has refused it
            return self.max_steps
        of_epochs = self.epochs * self.steps_per_epoch
        return of_epochs if self.max_steps is None else min(of_epochs, self.max_steps)

    def batch(self, step: int) -> Span:
        """The global batch that comes after `step` others."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.global_batch_size
        return Span(epoch, start, min(start + self.global_batch_size, self.num_samples))

    def num_parts_of(self, span: Span) -> int:
        """Parts that have samples: num_parts, or fewer in an epoch's short batch."""
        return -(-span.num_samples // self.part_size)

    def parts(self, span: Span, rank: int, world_size: int) -> tuple[Part, ...]:
        """The parts of a global batch that this rank trains on, in order; maybe none.

        Invariant: over the ranks of a world of any size, each position of the batch is in exactly
        one part, and a part holds the same positions whatever the world size.
        """
        size = self.part_size
        return tuple(
            Part(index, span.start + index * size, min(span.start + (index + 1) * size, span.stop))
            for index in range(rank, self.num_parts_of(span), world_size)
        )


def _what_fits(global_batch_size: int, num_parts: int) -> str:
    below = global_batch_size // num_parts * num_parts
    sizes = [str(size) for size in (below, below + num_parts) if size > 0]
    near = _nearest_divisors(global_batch_size, num_parts)
    counts = [str(count) for count in near if count > 0]
    return (
        f"global_batch_size={global_batch_size} cannot be cut into {num_parts} equal parts: use "
        f"global_batch_size={' or '.join(sizes)}, or num_parts={' or '.join(counts)}"
    )


def _nearest_divisors(number: int, near: int) -> list[int]:
    """The largest divisor of number below `near` and the smallest above it, where they exist."""
    below = next((d for d in range(min(near, number), 0, -1) if number % d == 0), 0)
    above = next((d for d in range(near, number + 1) if number % d == 0), 0)
    return [below, above] if above else [below]


def mix(*numbers: int) -> int:
    """One 63-bit seed from several whole numbers; different lists give unrelated seeds.

    SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), chained over the numbers. 63 bits, because that is what every generator
    accepts as a seed.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK_64)) + _GOLDEN_GAMMA & _MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state >> 1


def epoch_seed(seed: int, epoch: int) -> int:
    """Seeds the order of one epoch. It depends on nothing else, so no world size can change it."""
    return mix(0x0DE5, seed, epoch)


def part_seed(seed: int, step: int, part: int) -> int:
    """Seeds what a data worker draws (random crops, say) while it loads one part of one step."""
    return mix(0xDA7A, seed, step, part)
