"""The exchanges of one generation, told together about the parts of each batch.

The one idea: where a rank cannot know what to do, rank 0 says it. In an *uneven* batch (the short
one at the end of an epoch, or a world larger than the number of parts) some ranks have no part:
their loop over the parts is empty, so they cannot know which modules the others' backwards reach,
nor in which order. Rank 0, which always has a part, announces each exchange before it is made and
the end of the loop after the last; ranks without a part follow, with zeros, where their loop would
have been. So the gradients are there before anything that comes after the loop (clipping, say)
looks at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from resilient.errors import ConfigError
from resilient.worker.exchange import GradientExchange

_END = -1  # announced by rank 0: no more exchanges in this loop over the parts


class Exchanges:
    """Every exchange of one generation."""

    def __init__(self, *, group: Any, world_size: int) -> None:
        self._world_size = world_size
        self._group: Any = dist.group.WORLD if group is None and world_size > 1 else group
        self._exchanges: list[GradientExchange] = []
        self._is_uneven = False
        self._has_part = True

    def add(
        self, module: nn.Module, on_last_bucket: Callable[[], None] | None = None
    ) -> GradientExchange:
        exchange = GradientExchange(
            module, group=self._group, world_size=self._world_size, on_last_bucket=on_last_bucket
        )
        self._exchanges.append(exchange)
        return exchange

    def begin_parts(self, num_parts: int, num_parts_here: int) -> None:
        """A loop over the parts of a batch begins; num_parts: of the batch, over all ranks."""
        self.end_parts()
        if num_parts >= self._world_size or not self._exchanges:
            return
        self._is_uneven, self._has_part = True, num_parts_here > 0
        for exchange in self._exchanges:
            exchange._announce = self._announce if self._has_part else None
            exchange._end_parts = self.end_parts

    def part(
        self, index: int, is_last: bool, num_samples: int, num_global: int, previous: int
    ) -> None:
        """The next backward is for this part.

        Args:
            num_samples: of the part; 0 with is_last: this rank has none.
            num_global: of the global batch.
            previous: samples of the part before it in this loop, 0 for the first.
        """
        for exchange in self._exchanges:
            if previous and previous != num_samples:
                exchange.rescale(previous / num_samples)
            if is_last:
                exchange.arm(num_samples / num_global)
            else:
                exchange.disarm()

    def end_parts(self) -> None:
        """The loop has ended. Ranks without a part do here what the others did in theirs."""
        if not self._is_uneven:
            return
        self._is_uneven = False
        for exchange in self._exchanges:
            exchange._announce = exchange._end_parts = None
        if self._has_part:
            self._agree(_END)
            return
        while (number := self._agree(None)) != _END:
            self._exchanges[number]._exchange_now()

    def flush(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Before an optimizer steps."""
        self.end_parts()
        for exchange in self._exchanges:
            exchange.flush(optimizer)

    def detach(self) -> None:
        for exchange in self._exchanges:
            exchange.detach()
        self._exchanges = []
        self._group = None
        self._is_uneven = False

    def _announce(self, exchange: GradientExchange) -> None:
        self._agree(self._exchanges.index(exchange))

    def _agree(self, number: int | None) -> int:
        """Rank 0's number, on every rank; number: what this rank is about to do, if it knows."""
        device = self._exchanges[0]._params[0].device
        word = torch.tensor([_END if number is None else number], device=device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([word], options).wait()
        said = int(word.item())
        if number is not None and said != number:
            raise ConfigError(
                "the ranks' backwards reach different modules in a batch that not every rank has a "
                "part of: make them reach the same, or pass drop_last=True"
            )
        return said
