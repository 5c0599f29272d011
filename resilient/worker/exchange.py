"""Gradients of data-parallel replicas: exchanged once a global batch, behind its last backward.

The one idea: no wrapper, and an order that never changes. Each parameter tells, by an autograd
hook, that its gradient is there; when all of a *bucket* are, the bucket is copied into one flat
tensor, weighted, and an all-reduce of it starts while the backward goes on. Which parameter lies in
which bucket follows from the module alone, so the sums are taken in the same order from the first
step of every generation: a recovery at an unchanged world size is bitwise exact. (DDP arranges its
buckets anew after its first step, which changes bits.)

What a gradient is after backward(): with n_p samples in part p and N in the global batch, the sum
over all parts of (n_p / N) * grad_p. The parts before a rank's last one only accumulate.

After an exchange `p.grad` is a view of its bucket (no copy back; cleared gradients are copied in
again by the next backward). A bucket whose gradients are still held elsewhere is replaced, not
overwritten, so gradients that a script keeps do not change under it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from resilient.errors import ConfigError

FIRST_BUCKET_BYTES = 1 << 20  # small: the exchange starts early in the backward
BUCKET_BYTES = 25 << 20

_END = -1  # announced by rank 0: no more exchanges in this loop over the parts

_queue_callback = Variable._execution_engine.queue_callback
_graph_task = torch._C._current_graph_task_id
_running_node = torch._C._current_autograd_node
_storage_uses = torch._C._storage_Use_Count


class _Bucket:
    """Some parameters of one dtype and device, and the flat tensor their gradients travel in.

    Attributes:
        indices: of its parameters, in the exchange's own order.
        num_flags: of the last bucket only: one element a parameter of the module, behind the
            gradients, says whether this rank has a gradient for it.
    """

    __slots__ = (
        "data",
        "flags",
        "flat",
        "free_refs",
        "free_uses",
        "indices",
        "num_flags",
        "params",
        "pending",
        "views",
        "work",
    )

    def __init__(self, indices: list[int], params: list[nn.Parameter]) -> None:
        self.indices = indices
        self.params = params
        self.pending = len(params)
        self.num_flags = 0
        self.work: Any = None
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []

    def allocate(self) -> None:
        sizes = [param.numel() for param in self.params]
        like = self.params[0]
        self.flat = torch.empty(sum(sizes) + self.num_flags, dtype=like.dtype, device=like.device)
        self.data = self.flat[: sum(sizes)]
        self.flags = self.flat[sum(sizes) :]
        self.views = []
        offset = 0
        for param, size in zip(self.params, sizes, strict=True):
            # A gradient strided as its parameter keeps the optimizer on its fast path.
            strides = param.stride() if _is_dense(param) else _contiguous_strides(param.shape)
            self.views.append(self.flat.as_strided(param.shape, strides, offset))
            offset += size
        self.free_refs = self._num_refs(range(len(sizes)))
        self.free_uses = _storage_uses(self.flat.untyped_storage()._cdata)

    def _num_refs(self, which: Iterable[int]) -> int:
        return max([sys.getrefcount(self.views[i]) for i in which])

    def is_held_elsewhere(self, which: Iterable[int]) -> bool:
        """Whether somebody kept one of these gradients, or anything that shares their memory.

        Args:
            which: views that are no parameter's gradient any more.
        """
        assert self.flat is not None
        if _storage_uses(self.flat.untyped_storage()._cdata) > self.free_uses:
            return True
        return self._num_refs(which) > self.free_refs


class GradientExchange:
    """Makes the gradients of one module global. Lives as long as the generation.

    Without parts (`arm` never called) each backward exchanges, with weight 1 / world_size, as DDP.

    Raises from backward(), or from flush(): ConfigError for what cannot be exchanged; whatever a
    failed collective raises. After an error only detach() may be called.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Any,
        world_size: int,
        on_last_bucket: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            group: the ranks that exchange; None is the default group. Unused in a world of one.
            on_last_bucket: called just before the last bucket leaves; from then on another rank
                may commit this step.
        """
        self.module = module
        self._world_size = world_size
        self._on_last_bucket = on_last_bucket
        self._group: Any = None
        if world_size > 1:
            self._group = dist.group.WORLD if group is None else group
        parameters = list(module.named_parameters())
        self._frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        trained = [(name, p) for name, p in reversed(parameters) if p.requires_grad]
        if not trained:
            raise ConfigError("data_parallel: the module has no parameter that requires a gradient")
        self._names = [name for name, _ in trained]
        self._params = [param for _, param in trained]
        self._buckets = _assign(self._params)
        self._buckets[-1].num_flags = len(self._params)
        self._ids = {id(param) for param in self._params}
        self._buffers = _Buffers(module) if world_size > 1 else None

        self._armed = True
        self._weight = 1.0 / world_size
        self._is_batched = False  # arm() or disarm() was called: somebody tells us the parts
        self._is_partial = False  # the weights of all ranks do not add up to 1: see _take_base
        self._touched = False  # a backward reached the module in this batch
        self._exchanged = False  # so did an exchange
        self._base: list[torch.Tensor | None] | None = None
        self._marks: list[tuple[int, int] | None] | None = None
        self._announce: Callable[[GradientExchange], None] | None = None
        self._end_parts: Callable[[], None] | None = None
        self._is_open = False  # an exchange has begun and is not finished
        self._task = -1
        self._next = 0
        self._seen = bytearray(len(self._params))
        self._sum = dist.AllreduceOptions()
        if hasattr(self._sum, "asyncOp"):
            self._sum.asyncOp = True
        self._check_ranks_agree()
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, bucket))
            for bucket in self._buckets
            for index, param in zip(bucket.indices, bucket.params, strict=True)
        ]

    # ------------------------------------------------------------ told by the parts of a batch

    def arm(self, weight: float) -> None:
        """The next backward is the last of this batch on this rank: exchange behind it.

        Args:
            weight: samples of this part / samples of the global batch. 0: this rank has no part,
                and takes part with zeros, at flush() at the latest.
        """
        is_first = self._armed or not self._is_batched
        self._start_part(is_first, is_first and 0.0 < weight * self._world_size < 1 - 1e-9)
        self._armed = True
        self._weight = weight

    def disarm(self) -> None:
        """The next backward only accumulates: more parts of this batch follow on this rank."""
        is_first = self._armed or not self._is_batched
        self._start_part(is_first, is_first)
        self._armed = False

    def _start_part(self, is_first: bool, is_partial: bool) -> None:
        self._is_open = False  # a backward that was broken off leaves its exchange unfinished
        self._exchanged = False
        self._is_batched = True
        if is_first:
            self._touched = False
            self._base = self._marks = None
            self._is_partial = is_partial
            if is_partial and any(
                param.grad is not None and bool(param.grad.any()) for param in self._params
            ):
                self._take_base()
        elif self._touched:
            self._mark()
        for name, param in self._frozen:
            if param.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the module was given to data_parallel and requires a "
                    "gradient now: set requires_grad before data_parallel"
                )

    def rescale(self, factor: float) -> None:
        """Scales what was accumulated in this batch.

        Args:
            factor: samples of the part before / samples of the next one.
        """
        if not self._touched:
            return
        with torch.no_grad():
            if self._base is not None:
                self._add_base(-1)
            torch._foreach_mul_([p.grad for p in self._params if p.grad is not None], factor)
            if self._base is not None:
                self._add_base(1)
        if self._marks is not None:
            self._mark()

    def flush(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Exchanges now if this batch has not: a rank without a part, or without a backward.

        Called before a protected optimizer steps, on every rank.

        Args:
            optimizer: the one about to step; nothing is done if it has none of our parameters.
        """
        if self._end_parts is not None:
            self._end_parts()
        if not self._is_batched or self._exchanged:
            return
        if optimizer is not None and not any(
            id(param) in self._ids for group in optimizer.param_groups for param in group["params"]
        ):
            return
        self._exchange_now()

    def detach(self) -> None:
        """Takes the hooks off and lets go of the group; parameters and gradients stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._group = None
        self._on_last_bucket = self._announce = self._end_parts = None
        self._armed = self._is_open = False
        for bucket in self._buckets:
            bucket.work = None
            bucket.flat, bucket.views = None, []
        self._buffers = None

    # ------------------------------------------------------------ in the backward

    def _hook(self, index: int, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        seen = self._seen

        def gradient_is_there(param: torch.Tensor) -> None:
            if self._marks is not None:
                self._check_mark(index, param)
            if not self._armed:
                self._touched = True
                return
            task = _graph_task()
            if task != self._task or not self._is_open:
                self._enter(task)
            if seen[index]:
                raise ConfigError(
                    f"the gradient of {self._names[index]} arrived twice in one backward: with "
                    "torch.utils.checkpoint pass use_reentrant=False"
                )
            seen[index] = 1
            bucket.pending -= 1
            if bucket.pending == 0 and self._announce is None:
                self._launch_complete()

        return gradient_is_there

    def _enter(self, task: int) -> None:
        """The first gradient of a backward, or of one nested in it (reentrant checkpointing)."""
        if not self._is_open:
            self._begin()
        self._task = task
        self._touched = True
        _queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if not self._is_open:
            return
        nested = _running_node() is not None
        if nested and not all(self._seen):
            return  # the backward around it goes on, and brings the others
        self._finish()

    def _begin(self) -> None:
        self._is_open = True
        self._next = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.params)
            bucket.work = None
        self._seen[:] = bytes(len(self._seen))

    def _launch_complete(self) -> None:
        """Launches the next buckets while they are complete: always in the same order."""
        if self._world_size == 1:
            return  # there is nothing to overlap with
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        self._next += 1
        if self._next == len(self._buckets) and self._on_last_bucket is not None:
            self._on_last_bucket()
        with torch.no_grad():
            self._fill(bucket)
            if bucket.num_flags:
                self._write_flags(bucket.flags)
        if self._group is not None:
            bucket.work = self._group.allreduce([bucket.flat], self._sum)

    def _fill(self, bucket: _Bucket) -> None:
        """Puts this rank's gradients into the bucket, and the bucket's views in their place."""
        if bucket.flat is None:
            bucket.allocate()
        grads = [param.grad for param in bucket.params]
        moved = [i for i, grad in enumerate(grads) if grad is not bucket.views[i]]
        if moved and bucket.is_held_elsewhere(moved):
            bucket.allocate()
            moved = list(range(len(grads)))
        if self._weight == 0.0:
            bucket.data.zero_()  # not times 0: what is there may be infinite
        else:
            missing = [bucket.views[i] for i in moved if grads[i] is None]
            if missing:
                torch._foreach_zero_(missing)
            if self._is_scaled_while_copied(bucket, len(moved)):
                for i in moved:
                    if (grad := grads[i]) is not None:
                        torch.mul(grad, self._weight, out=bucket.views[i])
            else:
                self._copy(bucket, [i for i in moved if grads[i] is not None], grads)
                if self._base is not None:
                    self._add_base(-1, bucket)
                if self._weight != 1.0:
                    bucket.data.mul_(self._weight)
        for i in moved:
            if grads[i] is not None:
                bucket.params[i].grad = bucket.views[i]

    def _is_scaled_while_copied(self, bucket: _Bucket, num_moved: int) -> bool:
        """Same bits, one pass over memory less; worth a call a tensor where tensors are large."""
        return (
            self._base is None
            and num_moved == len(bucket.params)
            and self._weight != 1.0
            and bucket.data.device.type == "cpu"
            and bucket.data.numel() >= len(bucket.params) << 14
            and all(p.grad is None or p.grad.layout is torch.strided for p in bucket.params)
        )

    def _copy(
        self, bucket: _Bucket, moved: list[int], grads: Sequence[torch.Tensor | None]
    ) -> None:
        if not moved:
            return
        try:
            torch._foreach_copy_(
                [bucket.views[i] for i in moved],
                [grad for i in moved if (grad := grads[i]) is not None],
            )
        except RuntimeError:
            for i in moved:
                grad = grads[i]
                if grad is not None and grad.layout is not torch.strided:
                    raise ConfigError(
                        f"the gradient of {self._names[bucket.indices[i]]} is sparse, which "
                        "data_parallel does not exchange: build the embedding with sparse=False"
                    ) from None
            raise

    def _write_flags(self, flags: torch.Tensor) -> None:
        if self._weight == 0.0:
            flags.zero_()
            return
        flags.fill_(1)
        missing = [i for i, param in enumerate(self._params) if param.grad is None]
        if missing:
            flags[torch.tensor(missing, device=flags.device)] = 0

    def _finish(self) -> None:
        """Everything that has not left leaves; then the gradients are global."""
        if self._announce is not None:
            self._announce(self)
        if self._group is None and self._weight == 1.0 and self._base is None:
            if self._on_last_bucket is not None:
                self._on_last_bucket()
        else:
            self._exchange_rest()
            self._place_missing()
            if self._base is not None:
                with torch.no_grad():
                    self._add_base(1)
            if self._is_partial:
                self._take_base()
        self._is_open = False
        self._exchanged = True

    def _exchange_rest(self) -> None:
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        if self._group is None:
            return
        if self._buffers is not None:
            self._buffers.launch(self._group)
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work = None
        if self._buffers is not None:
            self._buffers.wait()

    def _place_missing(self) -> None:
        """Where only other ranks had a gradient, it is now here too; where nobody had one (the
        flags are zero), it stays absent, and the optimizer leaves the parameter alone."""
        if all(param.grad is not None for param in self._params):
            return
        used = self._buckets[-1].flags.tolist()
        for bucket in self._buckets:
            for index, param, view in zip(bucket.indices, bucket.params, bucket.views, strict=True):
                if param.grad is None and used[index]:
                    param.grad = view

    def _exchange_now(self) -> None:
        if not self._touched:
            self._weight = 0.0  # nothing of this batch is here; an older gradient does not count
        self._begin()
        self._finish()

    # ------------------------------------------------------------ gradients that were there before

    def _take_base(self) -> None:
        """Remembers the gradients as they are: global ones, which must not be summed again.

        Where the ranks' weights add up to 1, old global gradients that were not cleared survive an
        exchange unchanged, as in DDP. With several parts on some rank they do not add up to 1, so
        what was there before (a GAN clears late, or calls backward() twice) is taken out before the
        exchange and added again after it.
        """
        self._base = [None if p.grad is None else p.grad.detach().clone() for p in self._params]
        self._mark()

    def _add_base(self, sign: int, bucket: _Bucket | None = None) -> None:
        assert self._base is not None
        if bucket is None:
            indices: Sequence[int] = range(len(self._params))
            grads: Sequence[torch.Tensor | None] = [param.grad for param in self._params]
        else:  # its views hold the gradients already, p.grad may not yet
            indices, grads = bucket.indices, bucket.views
        pairs = [
            (grad, base)
            for index, grad in zip(indices, grads, strict=True)
            if grad is not None and (base := self._base[index]) is not None
        ]
        if pairs:
            torch._foreach_add_([g for g, _ in pairs], [b for _, b in pairs], alpha=sign)

    def _mark(self) -> None:
        """Remembers which tensors the gradients are, so that the next hook sees what was done to
        them in between. (Not the tensors themselves: that would hold them.)"""
        self._marks = [
            None if p.grad is None else (id(p.grad), p.grad._version) for p in self._params
        ]

    def _check_mark(self, index: int, param: torch.Tensor) -> None:
        assert self._marks is not None and param.grad is not None
        mark, self._marks = self._marks[index], None
        if mark is None or mark == (id(param.grad), param.grad._version - 1):
            return
        if not self._touched or self._exchanged:
            if id(param.grad) != mark[0]:
                self._base = None  # cleared before this backward
                return
            raise ConfigError(
                "gradients were changed between two backward() calls of one part, with several "
                "parts in this batch: clear or clip them after the loop over the parts"
            )
        raise ConfigError(
            "gradients were cleared or changed between the parts of a global batch, which loses "
            "those of the parts before: call zero_grad() after optimizer.step()"
        )

    # ------------------------------------------------------------ checks

    def _check_ranks_agree(self) -> None:
        """Buckets must match, or the sums would mix up parameters."""
        if self._world_size == 1:
            return
        layout = [
            (name, tuple(param.shape), str(param.dtype))
            for name, param in zip(self._names, self._params, strict=True)
        ]
        assert self._buffers is not None
        digest = hashlib.sha256(repr((layout, self._buffers.layout)).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        both = torch.tensor([number, -number], device=self._params[0].device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        if both.tolist() != [number, -number]:
            raise ConfigError(
                "data_parallel: the ranks have different modules (names, shapes, dtypes or "
                "requires_grad of the parameters, or the buffers); build the same on every rank"
            )


class _Buffers:
    """The module's buffers (BatchNorm's statistics, say): every rank gets rank 0's."""

    def __init__(self, module: nn.Module) -> None:
        # .data: the write must not count as a change of a tensor that a second backward of the same
        # forward saved (BatchNorm saves its buffers).
        buffers = [buffer.data for buffer in module.buffers() if buffer.numel()]
        self.layout = [(tuple(b.shape), str(b.dtype)) for b in buffers]
        self._flats: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        self._works: list[Any] = []
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            mine = [buffer for buffer in buffers if buffer.device == device]
            starts, end = [], 0
            for buffer in mine:
                starts.append(end)
                end += -(-buffer.numel() * buffer.element_size() // 16) * 16  # keep them aligned
            flat = torch.zeros(end, dtype=torch.uint8, device=device)
            views = [
                flat[start : start + buffer.numel() * buffer.element_size()]
                .view(buffer.dtype)
                .view(buffer.shape)
                for start, buffer in zip(starts, mine, strict=True)
            ]
            self._flats.append((flat, views, mine))
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        if hasattr(self._options, "asyncOp"):
            self._options.asyncOp = True

    def launch(self, group: Any) -> None:
        self._is_root = self._flats and group.rank() == 0
        self._works = []
        for flat, views, buffers in self._flats:
            if self._is_root:
                torch._foreach_copy_(views, buffers)
            self._works.append(group.broadcast([flat], self._options))

    def wait(self) -> None:
        for work, (_, views, buffers) in zip(self._works, self._flats, strict=True):
            work.wait()
            if not self._is_root:
                torch._foreach_copy_(buffers, views)
        self._works = []


class Exchanges:
    """The exchanges of one generation, told together about the parts of each batch.

    In an *uneven* batch (the short one at the end of an epoch, or a world larger than the number of
    parts) some ranks have no part: their loop over the parts is empty, so they cannot know which
    modules the others' backwards reach, nor in which order. There rank 0, which always has a part,
    announces each exchange before it is made and the end of the loop after the last; ranks without
    a part follow, with zeros, where their loop would have been. So the gradients are there before
    anything that comes after the loop (clipping, say) looks at them.
    """

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


def _assign(params: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Buckets of one dtype and device each, in the order in which they are launched.

    Gradients arrive roughly from the last parameter to the first; params are in that order.
    """
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, param in enumerate(params):
        key = (param.dtype, param.device)
        bucket = filling.setdefault(key, [])
        bucket.append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + param.numel() * param.element_size()
        if filled_bytes[key] >= (BUCKET_BYTES if done else FIRST_BUCKET_BYTES):
            done.append(filling.pop(key))
            filled_bytes[key] = 0
    done.extend(filling.values())
    return [_Bucket(indices, [params[i] for i in indices]) for indices in done]


def _is_dense(param: torch.Tensor) -> bool:
    return param.is_contiguous() or (
        (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
        or (param.dim() == 5 and param.is_contiguous(memory_format=torch.channels_last_3d))
    )


def _contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
