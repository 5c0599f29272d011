"""Which samples a part is made of, and in which order a rank needs its parts.

Sample order is a function of (seed, epoch), and what a rank loads one of the world it is in: so
everything that will ever be needed can be asked for ahead, from any step on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from resilient.core.batches import Deal, Part, epoch_seed, part_seed


class Request(NamedTuple):
    """One part to load."""

    step: int
    part: int
    seed: int
    indices: list[int]


@dataclass(frozen=True)
class Dealing:
    """What one rank of one generation loads, and in which order.

    Apart from Batches, because the data workers' loader outlives those, and keeps this.
    """

    deal: Deal
    rank: int
    world_size: int
    shuffle: bool
    seed: int

    def requests(self, step: int, first_part: int) -> Iterator[Request]:
        """Everything from there on; first_part: of that step."""
        for later in range(step, self.deal.num_steps):
            for part in self.deal.parts(self.deal.batch(later), self.rank, self.world_size):
                if later > step or part.number >= first_part:
                    seed = part_seed(self.seed, later, part.number)
                    yield Request(later, part.number, seed, self.indices(later, part))

    def indices(self, step: int, part: Part) -> list[int]:
        """The samples of a part."""
        if not self.shuffle:
            return list(range(part.start, part.stop))
        order = order_of_epoch(self.deal.num_samples, self.seed, self.deal.batch(step).epoch)
        return order[part.start : part.stop].tolist()


@functools.lru_cache(maxsize=4)  # two data sets, two epochs (prefetching); survives a generation
def order_of_epoch(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of one epoch: torch.randperm of a CPU generator with core.batches.epoch_seed.

    Returns:
        A permutation, int64, (num_samples,); not to be changed.
    """
    generator = torch.Generator()
    generator.manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)
