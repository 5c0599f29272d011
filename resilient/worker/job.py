"""What the train function is given: its place in the world, and the calls that make it recoverable.

One Job is one entry of the train function in one generation. The idea behind all of its calls: each
is a point where the function may be left. A call first finishes what it is asked for as far as that
makes a step count (the *commit*), then looks whether the generation was aborted, and only then goes
on; so a step that every rank has done is never thrown away because one more has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.hooks import RemovableHandle

from resilient import wire
from resilient.errors import ConfigError, Interrupted, StaleGeneration
from resilient.page import Activity
from resilient.worker.data import Batches
from resilient.worker.exchanges import Exchanges
from resilient.worker.lifetime import Entry, Lifetime
from resilient.worker.sever import num_gloo_links

Module = TypeVar("Module", bound=nn.Module)

_ABORT_WAIT_S = 10.0
"""A lost connection is followed by an abort within milliseconds; longer means: by none."""


class Job:
    """The generation as its train function sees it. Made by `resilient.train`, never by the user.

    Attributes:
        rank, local_rank, world_size: as under torchrun, in this generation.
        generation: number of this generation; 0 in an unbroken run.
        device: where `build` puts modules: this local rank's accelerator, or the CPU.
    """

    def __init__(self, lifetime: Lifetime, entry: Entry, device: torch.device) -> None:
        self.rank = entry.rank
        self.local_rank = entry.local_rank
        self.world_size = entry.world_size
        self.generation = entry.generation
        self.device = device
        self._lifetime = lifetime
        self._entry = entry
        self._page = lifetime.page
        self._mesh: DeviceMesh | None = None
        self._exchanges: Exchanges | None = None
        self._exchanged: list[nn.Module] = []
        self._batch_hooks: list[BatchHooks] = []
        self._step_hooks: list[RemovableHandle] = []
        self._objects: dict[str, Any] | None = None  # what was protected
        self._restored = False
        self._committed = False  # in this generation
        self._asked = False  # likewise
        self._handed_out = False  # a batch since the last commit
        self._left = False
        self._num_links = num_gloo_links()
        lifetime.builds.begin_entry()

    # ------------------------------------------------------------ what it says

    @property
    def step(self) -> int:
        """Index of the step in progress: the number of committed steps."""
        return self._lifetime.step

    @property
    def mesh(self) -> DeviceMesh:
        """A 1-D mesh over all ranks, axis "dp"; unusable once this generation has ended."""
        self._check()
        if self._mesh is None:
            self._mesh = init_device_mesh(
                self.device.type, (self.world_size,), mesh_dim_names=("dp",)
            )
        return self._mesh

    def __repr__(self) -> str:
        return (
            f"Job(rank={self.rank}, world_size={self.world_size}, "
            f"generation={self.generation}, step={self.step})"
        )

    # ------------------------------------------------------------ before the loop

    def build(self, factory: Callable[[], Module]) -> Module:
        """The module that `factory()` makes, on `device`; the same object at the next entry.

        A module that is changed in place before `protect` is built anew at each entry instead.

        Args:
            factory: takes nothing; known by its name and the number of the call, so entries should
                build the same things in the same order.
        """
        self._check()
        self._reached("building")
        return self._lifetime.builds.build(factory, self.device)  # type: ignore[return-value]

    def data_parallel(self, module: Module) -> Module:
        """Has the module's gradients averaged over all ranks in backward; returns the same module.

        Raises:
            ConfigError: the module is in the hands of an earlier call.
        """
        self._check()
        self._reached("building")
        if any(module is known for known in self._exchanged):
            raise ConfigError("job.data_parallel() was called twice for one module: once is enough")
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None and self.world_size > 1:
            raise ConfigError(
                "job.data_parallel() needs the process groups: with init_process_group=False, call "
                "torch.distributed.init_process_group() first"
            )
        if self._exchanges is None:
            # Alone there is nobody to exchange with: no collective, only the weights.
            group = group if self.world_size > 1 else None
            self._exchanges = Exchanges(group=group, world_size=self.world_size)
        self._exchanges.add(module, self._on_last_bucket)
        self._exchanged.append(module)
        return module

    def batches(
        self,
        dataset: Any,
        global_batch_size: int,
        num_parts: int | None = None,
        epochs: int | None = 1,
        max_steps: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Batches:
        """Global batches of a map-style data set; each yields the parts that are this rank's.

        Every sample once an epoch, in an order that depends on (seed, epoch) only. Protected, it
        commits: asking for the next batch says that the last one's step is done.

        Args:
            global_batch_size: samples of one step, over all ranks together.
            num_parts: pieces of a global batch, fixed for the job, also where it is started again
                with another number of ranks; default: one for each rank of its first generation.
            max_steps: ends after so many global batches in all; needed when epochs is None.
        """
        self._check()
        self._reached("building")
        hooks = BatchHooks(self)
        hooks.batches = Batches(
            dataset,
            job_hooks=hooks,
            rank=self.rank,
            world_size=self.world_size,
            global_batch_size=global_batch_size,
            num_parts=num_parts,
            default_num_parts=self._lifetime.first_world_size,
            epochs=epochs,
            max_steps=max_steps,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_workers=num_workers,
            collate_fn=collate_fn,
            loaders=self._lifetime.loaders,
        )
        self._batch_hooks.append(hooks)
        return hooks.batches

    def protect(self, **objects: Any) -> None:
        """Restores the objects if there is a past, and keeps their state from now on.

        Modules, optimizers, schedulers, scalers, `batches`, anything with state_dict() and
        load_state_dict(). Once in each entry, with everything, before the first batch.

        Raises:
            ConfigError: called twice; an object has no state_dict; names or shapes do not fit the
                state that is to be restored.
        """
        self._check()
        self._reached("building")
        if self._objects is not None:
            raise ConfigError("job.protect() is called once: give it everything in one call")
        if self._committed:
            raise ConfigError("job.protect() must come before the first job.commit()")
        self._objects = objects
        for hooks in self._batch_hooks:
            hooks.protected = any(value is hooks.batches for value in objects.values())
        # Before Protected's own hooks: what is done here still belongs to the clean state.
        for optimizer in self._optimizers():
            self._step_hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
        self._lifetime.builds.begin_protect()
        self._page.act(Activity.RESTORING)
        self._reached("restoring")
        self._set_step(self._restore(objects))
        self._hook_drills()
        self._say_restored()
        self._check()

    def _restore(self, objects: dict[str, Any]) -> int:
        entry = self._entry
        return self._lifetime.protected.protect(
            objects,
            cut=entry.cut,
            rank=entry.rank,
            world_size=entry.world_size,
            generation=entry.generation,
            group=dist.group.WORLD if dist.is_initialized() else None,
            predecessor=entry.predecessor,
        )

    # ------------------------------------------------------------ in the loop

    def commit(self) -> None:
        """Makes the step count that a protected optimizer has done; without one, nothing.

        For loops without `batches`. Where no optimizer is protected, each call counts one step.
        """
        self._begin_call()
        if self._is_commit_due() or (self._objects is not None and not self._optimizers()):
            self._commit()
        self._check()

    @contextmanager
    def section(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        """Work between two steps (evaluation, saving, logging with collectives).

        Entered after optimizer.step(), it commits that step before anything else.

        Args:
            name: for the report and for stack dumps.
            timeout_s: no sign of progress for so long is a hang; default: the usual bound.
        """
        self._begin_call()
        if self._is_commit_due():
            self._commit()
        self._check()
        before = self._page.read().activity
        self._page.enter_section(name, int(1e9 * timeout_s) if timeout_s is not None else 0)
        try:
            yield
        finally:
            self._page.leave_section(before)

    def _begin_call(self) -> None:
        if self._left:
            self._check()
        if not self._restored:
            self._say_restored()

    def _ask_for_batch(self) -> None:
        """The protected batches are asked for the next one, or for the end."""
        self._begin_call()
        if self._is_commit_due():
            self._commit()
        elif self._handed_out:
            self._refuse_asking_ahead()
        self._check()
        if not self._asked:
            self._asked = True
            self._lifetime.protected.rewind_rng()
        self._reached("batch")

    def _refuse_asking_ahead(self) -> None:
        self._check()
        if self._links_lost():
            # The train function swallowed the error of a collective: no mistake of its loop.
            self._lifetime.link.wait_abort(self.generation, _ABORT_WAIT_S)
            self._check()
        raise ConfigError(
            f"the batch after step {self.step} was asked for, but no protected optimizer has "
            "stepped: call optimizer.step() once for each batch, and protect the optimizer (and "
            "the GradScaler, if there is one)"
        )

    def _is_commit_due(self) -> bool:
        if self._objects is None:
            return False
        if not self._optimizers():
            return self._handed_out
        return self._lifetime.protected.stepped

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        values = (self._objects or {}).values()
        return [value for value in values if isinstance(value, torch.optim.Optimizer)]

    def _commit(self) -> None:
        """Counts the step in progress. Nothing leaves the process but the first one's message."""
        lifetime = self._lifetime
        step = lifetime.step + 1
        lifetime.protected.commit(step)
        lifetime.step = step
        self._page.commit(step)
        self._handed_out = False
        if not self._committed:
            self._committed = True
            lifetime.link.send(wire.Stepped(self.generation, step))
        checkpoints = lifetime.checkpoints
        if checkpoints is not None and checkpoints.every and step % checkpoints.every == 0:
            lifetime.protected.persist(step, checkpoints.directory)

    def _on_last_bucket(self) -> None:
        # Others may commit this step as soon as they have our gradients; if we die then, whoever
        # takes our place needs our random numbers.
        if self._objects is not None:
            self._lifetime.protected.tentative(self.step + 1)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A protected optimizer is about to change something."""
        if self._exchanges is not None:
            self._exchanges.flush(optimizer)
        else:
            # Somebody else's gradient exchange: whether it was cut short is not known.
            self._check()

    # ------------------------------------------------------------ around the train function

    def _finish(self) -> None:
        """The train function has returned."""
        self._begin_call()
        if self._is_commit_due():
            self._commit()
        self._check()

    def _close(self) -> None:
        """This generation has ended; the user may still hold this object."""
        self._left = True
        if self._exchanges is not None:
            self._exchanges.detach()
            self._exchanges = None
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        self._batch_hooks.clear()
        self._exchanged.clear()
        self._mesh = None
        self._objects = None
        self._lifetime.protected.release()
        self._lifetime.loaders.reclaim()

    def _links_lost(self) -> bool:
        return num_gloo_links() < self._num_links

    def _set_step(self, step: int) -> None:
        self._lifetime.step = step
        self._page.set_step(step)

    def _say_restored(self) -> None:
        self._restored = True
        self._page.act(Activity.TRAINING)
        self._lifetime.link.send(wire.Restored(self.generation))

    def _check(self) -> None:
        """Raises Interrupted when the generation was aborted."""
        if self._left:
            raise StaleGeneration(
                f"this job object is of generation {self.generation}, which has ended: use the one "
                "that the train function is given",
                generation=self.generation,
                rank=self.rank,
            )
        if self._lifetime.link.is_aborted(self.generation):
            raise Interrupted(f"generation {self.generation} has ended")

    # ------------------------------------------------------------ fire drills

    def _reached(self, point: str) -> None:
        self._lifetime.drills.reached(point, self.step)

    def _hook_drills(self) -> None:
        """For drills inside and after optimizer.step(), where the state is dirty."""
        points = self._lifetime.drills.points
        for optimizer in self._optimizers():
            if "optimizer" in points:
                hook = optimizer.register_step_pre_hook(lambda *_: self._reached("optimizer"))
                self._step_hooks.append(hook)
            if "after-step" in points:
                hook = optimizer.register_step_post_hook(lambda *_: self._reached("after-step"))
                self._step_hooks.append(hook)


class BatchHooks:
    """What `Batches` calls; each has its own. Only that of a protected one commits, or refuses."""

    batches: Batches

    def __init__(self, job: Job) -> None:
        self._job = job
        self.protected = False

    def ask(self) -> None:
        """The next batch, or the end, is asked for."""
        if self.protected:
            self._job._ask_for_batch()
        else:
            self._job._begin_call()
            self._job._check()

    def handed_out(self) -> None:
        """A batch is there and about to be given to the loop."""
        if self.protected:
            self._job._handed_out = True

    def check_interrupted(self) -> None:
        """Called while data is waited for."""
        self._job._check()

    def begin_parts(self, num_parts: int, num_parts_here: int) -> None:
        """The loop over the parts of a batch begins; num_parts: over all ranks."""
        if self._trains and self._job._exchanges is not None:
            self._job._exchanges.begin_parts(num_parts, num_parts_here)

    def part(
        self, index: int, is_last: bool, num_samples: int, num_total: int, num_previous: int, /
    ) -> None:
        """A part is about to be given to the loop; num_previous: 0 before the first."""
        if self._trains and self._job._exchanges is not None:
            self._job._exchanges.part(index, is_last, num_samples, num_total, num_previous)

    def end_parts(self) -> None:
        """The loop over the parts has come to its end."""
        if self._trains and self._job._exchanges is not None:
            self._job._exchanges.end_parts()

    @property
    def _trains(self) -> bool:
        """An unprotected one beside a protected one only evaluates: no gradients follow."""
        return self.protected or not any(hooks.protected for hooks in self._job._batch_hooks)
