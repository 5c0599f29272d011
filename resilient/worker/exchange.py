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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from resilient.errors import ConfigError
from resilient.worker.buckets import Bucket, Buffers, assign

_queue_callback = Variable._execution_engine.queue_callback
_graph_task = torch._C._current_graph_task_id
_running_node = torch._C._current_autograd_node


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
        self._buckets = assign(self._params)
        self._buckets[-1].num_flags = len(self._params)
        self._ids = {id(param) for param in self._params}
        self._buffers = Buffers(module) if world_size > 1 else None

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

    def _hook(self, index: int, bucket: Bucket) -> Callable[[torch.Tensor], None]:
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

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        if self._next == len(self._buckets) and self._on_last_bucket is not None:
            self._on_last_bucket()
        with torch.no_grad():
            self._fill(bucket)
            if bucket.num_flags:
                self._write_flags(bucket.flags)
        if self._group is not None:
            bucket.work = self._group.allreduce([bucket.flat], self._sum)

    def _fill(self, bucket: Bucket) -> None:
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

    def _is_scaled_while_copied(self, bucket: Bucket, num_moved: int) -> bool:
        """Same bits, one pass over memory less; worth a call a tensor where tensors are large."""
        return (
            self._base is None
            and num_moved == len(bucket.params)
            and self._weight != 1.0
            and bucket.data.device.type == "cpu"
            and bucket.data.numel() >= len(bucket.params) << 14
            and all(p.grad is None or p.grad.layout is torch.strided for p in bucket.params)
        )

    def _copy(self, bucket: Bucket, moved: list[int], grads: Sequence[torch.Tensor | None]) -> None:
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

    def _add_base(self, sign: int, bucket: Bucket | None = None) -> None:
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
