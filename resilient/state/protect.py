"""What a process holds of the training state, from its first entry to its last breath.

One object a process: the user's objects come and go with the entries, the tensors of the last
committed step stay. Parameters and optimizer state are held by reference: *clean* at the committed
step until a protected optimizer steps, *dirty* from then to the commit. The small state is copied
at each commit, for the last two steps. An *undo copy*, taken just before the optimizer, is what a
process falls back to when it is found dirty; it costs memory and a copy a step, so it is made only
where a collective can come between the optimizer and the commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resilient.core.cut import source_of
from resilient.core.model import Cut, CutKind, Holding
from resilient.errors import CheckpointMissing, ConfigError
from resilient.page import Page
from resilient.state import transfer
from resilient.state.encoding import Node
from resilient.state.generators import Generators
from resilient.state.objects import Inventory
from resilient.state.snapshot import AlternatingCopies, Copies, Image, Tensors, versions_of

STEPS_WITH_UNDO = 2
"""Steps after each entry in which an undo copy is always taken: by then it is known whether the
script has collectives between its optimizer step and the commit."""


class _Small(NamedTuple):
    """The small state at a commit."""

    tree: dict[str, Node]
    buffers: Tensors
    others: Tensors


class _Big(NamedTuple):
    """Parameters and optimizer state: by reference, or as copies in the same order.

    generation: the one it was restored or committed in.
    versions: of the tensors at the time, compared to prove that nobody wrote to them; for copies
    those of the parameters that were not copied since nothing trains them.
    """

    step: int
    generation: int
    parameters: Tensors
    states: Tensors
    tensors: list[Tensor]
    versions: list[int]

    def is_unchanged(self) -> bool:
        return versions_of(self.tensors) == self.versions


class Protected:
    """The state of one process. All calls are from the training thread.

    Args:
        page: where the random number generators outlive the process; None: nowhere.
        note: is told what a user should know, a line each.
        checkpoint_directory: where a generation resumes from disk, and where the generators are
            left for the rank that persists; may be set later.
    """

    def __init__(
        self,
        page: Page | None = None,
        *,
        note: Callable[[str], None] | None = None,
        checkpoint_directory: str | None = None,
    ) -> None:
        self.page = page
        self.checkpoint_directory = checkpoint_directory
        self._checkpoints: Any = None  # disk.Checkpoints, from the first one that is written
        self._note = note or (lambda line: None)
        self._generators = Generators(page, self._note)
        self._inventory: Inventory | None = None
        self._group: Callable[[], Any] = _no_group  # weak: it must not outlive its generation
        self._rank = 0
        self._world_size = 1
        self._hooks: list[Any] = []
        # what is held
        self._live: _Big | None = None
        self._undo: _Big | None = None
        self._small: dict[int, _Small] = {}
        self._dirty = False
        self._generation = -1  # of the last restore
        # of this entry
        self._num_stepped = 0
        self._scalers_seen: list[Any] = []
        self._sequence: int | None = None
        self._num_commits = 0
        self._undo_for_good = False
        self._big_cache: tuple[Tensors, Tensors, list[Tensor]] | None = None
        self._big_sources: list[Tensors] = []
        self._buffer_copies = AlternatingCopies()
        self._undo_copies = Copies()

    # ------------------------------------------------------------ entering

    def protect(
        self,
        objects: Mapping[str, Any],
        *,
        cut: Cut,
        rank: int,
        world_size: int,
        generation: int = -1,
        group: Any = None,
        predecessor: Page | None = None,
    ) -> int:
        """Makes the objects what the cut says, on every rank of the group.

        Args:
            generation: whose cut it is; what is held from here on belongs to it.
            predecessor: page of the process that held this rank before.
        Returns:
            the number of committed steps.
        Raises:
            ConfigError: an object cannot be protected, or is not the one that was saved.
            CheckpointMissing, CheckpointCorrupt: what the cut promises is not there.
        """
        inventory = Inventory(objects)
        self.release()
        self._rank, self._world_size = rank, world_size
        self._group = _no_group if group is None else weakref.ref(group)
        for param in inventory.parameters.values():
            param.grad = None
        if self._checkpoints is not None:
            self._checkpoints.enter()
        if cut.kind is CutKind.INITIAL:
            self._begin(inventory, group)
        elif cut.kind is CutKind.DISK:
            self._load(inventory, cut.step)
        elif rank in cut.holders:
            self._keep_own(inventory, cut.step)
        else:
            self._receive(inventory, cut, group)
        if cut.kind is CutKind.MEMORY:
            self._generators.restore(cut.step, rank, predecessor, self._rng_on_disk)
            if self.checkpoint_directory is not None:
                _disk().forget_rng(self.checkpoint_directory, rank, cut.step)
        self._generation = generation
        self._adopt(inventory, cut.step)
        to = transfer.receivers_of(cut, rank, world_size)
        if to:
            transfer.send(self._image(cut.step), to, group, self._progress)
        return cut.step

    def release(self) -> None:
        """Lets go of the user's objects (at the end of an entry); what is held stays held."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._inventory = None
        self._group = _no_group
        self._big_cache = None

    def _begin(self, inventory: Inventory, group: Any) -> None:
        """Step 0: replicas follow rank 0, whatever each was seeded with."""
        self._live = self._undo = None
        # Before anything is sent: should the generation end in between, some ranks hold step 0, and
        # this one goes on from theirs with generators that only it has.
        self._generators.keep(0)
        self._clear_pending()
        if self._world_size == 1:
            return
        if self._rank == 0:
            buffers = inventory.read_buffers()
            image = Image(0, parameters=inventory.parameters, buffers=buffers)
            others = list(range(1, self._world_size))
            transfer.send(image, others, group, self._progress)
        else:
            image = transfer.receive(0, inventory.memory_for, group, self._progress)
            inventory.restore(image, modules_only=True)

    def _load(self, inventory: Inventory, step: int) -> None:
        if self.checkpoint_directory is None:
            raise CheckpointMissing("resuming from disk needs a checkpoint directory", step=step)
        self._live = self._undo = None
        disk = _disk()
        image, rng = disk.load(self.checkpoint_directory, step, self._rank)
        inventory.restore(image)
        self._clear_pending()
        self._generators.adopt(step, self._rank, rng)

    def _rng_on_disk(self, step: int) -> bytes | None:
        """For a rank that was interrupted before it had loaded what its peers now give it."""
        if self.checkpoint_directory is None:
            return None
        rng: bytes | None = _disk().rng_of(self.checkpoint_directory, step, self._rank)
        return rng

    def _clear_pending(self) -> None:
        if self.checkpoint_directory is None or self._rank != 0:
            return
        if self._checkpoints is not None:
            self._checkpoints.wait_idle(_disk().RANKS_TIMEOUT_S)  # its files are not left over
        _disk().clear_pending(self.checkpoint_directory)

    def _keep_own(self, inventory: Inventory, step: int) -> None:
        big = self._held(step)
        if big is None:
            raise CheckpointMissing(
                f"step {step} was held by this rank and was written over between the entry of the "
                "train function and job.protect(): make modules with job.build(), and initialise "
                "them in its factory",
                rank=self._rank,
                step=step,
            )
        inventory.restore(self._image(step))
        if big is self._undo:
            # its optimizer state has been adopted: it is no copy any more
            self._undo, self._undo_copies = None, Copies()

    def _receive(self, inventory: Inventory, cut: Cut, group: Any) -> None:
        def memory(section: str, key: str, dtype: torch.dtype, shape: Any, kind: str) -> Tensor:
            # Said before the first byte arrives: from then on the old state may be half gone.
            self._live = None
            return inventory.memory_for(section, key, dtype, shape, kind)

        source = source_of(cut, self._rank, self._world_size)
        assert source is not None  # a holder keeps its own
        image = transfer.receive(source, memory, group, self._progress)
        inventory.restore(image)

    def rewind_rng(self) -> None:
        """Sets the generators to the committed step again, when the first batch is asked for:
        what main() drew between protect() and its loop it had not drawn in an unbroken run."""
        if self._live is not None and self._num_commits == 0:
            self._generators.rewind(self._live.step)

    def _adopt(self, inventory: Inventory, step: int) -> None:
        """The objects hold that step now: watch them."""
        self._inventory = inventory
        inventory.begin_scales()
        for optimizer in inventory.hooked:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        if len(inventory.hooked) > 1 and not self._undo_for_good:
            self._undo_for_good = True
            self._note(
                "several optimizers are protected: their state is copied before the first one "
                f"steps, {self._num_big_bytes(inventory) / 2**20:.1f} MiB a step"
            )
        for old in [other for other in self._small if not step - 1 <= other <= step]:
            del self._small[old]
        self._generators.forget(step - 1, step)
        self._record(step)
        self._num_commits = 0

    @staticmethod
    def _num_big_bytes(inventory: Inventory) -> int:
        for entry in inventory.optimizers:
            entry.read()
        states = [t for entry in inventory.optimizers for t in entry.tensors]
        return sum(t.nbytes for t in [*inventory.parameters.values(), *states])

    # ------------------------------------------------------------ stepping

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped since the commit, or a scaler made one skip its step."""
        return self._num_stepped > 0 or self._scalers_moved()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._dirty:
            return
        # A closure runs backward, and so collectives, between two updates of the parameters.
        closure = any(arg is not None for arg in args[1:]) or kwargs.get("closure")
        if self._undo_for_good or closure or self._num_commits < STEPS_WITH_UNDO:
            self._take_undo()
        self._dirty = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._num_stepped += 1
        self._sequence = self._collectives()

    def _collectives(self) -> int | None:
        """How many collectives the generation's group has seen."""
        group = self._group()
        return None if group is None else int(group._get_sequence_number_for_group())

    def _take_undo(self) -> None:
        live = self._live
        self._undo = None  # its memory is written over now
        if live is None or self._inventory is None or not live.is_unchanged():
            return
        static = self._inventory.static
        moving = {key: t for key, t in live.parameters.items() if key not in static}
        still = {key: t for key, t in live.parameters.items() if key in static}
        copies = self._undo_copies.take([*moving.values(), *live.states.values()])
        parameters = dict(zip(moving, copies, strict=False))
        states = dict(zip(live.states, copies[len(moving) :], strict=True))
        watched = list(still.values())
        versions = versions_of(watched)
        kept = {**parameters, **still}
        self._undo = _Big(live.step, live.generation, kept, states, watched, versions)

    def tentative(self, step: int) -> None:
        """The last gradients of a step are about to leave: others may commit it from now on."""
        self._generators.keep(step)

    def commit(self, step: int) -> None:
        """The state is that of `step` committed steps.

        Raises:
            ConfigError: something in the small state cannot be kept; names it.
        """
        if self._inventory is None:
            raise ConfigError("nothing is protected: call job.protect() before the first step")
        if (
            self._sequence is not None
            and not self._undo_for_good
            and self._collectives() != self._sequence
        ):
            self._undo_for_good = True
            self._note(
                "a collective came between optimizer.step() and the commit: the state is copied "
                f"before each step from now on, {self._num_big_bytes(self._inventory) / 2**20:.1f} "
                "MiB; put what comes after the step into a job.section() to avoid it"
            )
        if self._num_commits < STEPS_WITH_UNDO or any(
            entry.has_new_groups() for entry in self._inventory.optimizers
        ):
            self._look_again()
        self._record(step)
        self._num_commits += 1
        if self._undo is not None and self._undo.step < step - 1:
            self._undo, self._undo_copies = None, Copies()

    def _look_again(self) -> None:
        """Parameters and buffers that a module made after protect() are protected too."""
        assert self._inventory is not None
        fresh = Inventory(self._inventory.objects)
        old = self._inventory
        if (
            any(entry.has_new_groups() for entry in old.optimizers)
            or fresh.parameters.keys() != old.parameters.keys()
            or fresh.read_buffers().keys() != old.read_buffers().keys()
        ):
            self._inventory = fresh
            self._big_cache = None

    def _record(self, step: int) -> None:
        inventory = self._inventory
        assert inventory is not None
        tree, others = inventory.read_small()
        parameters, states, tensors = self._read_big(inventory, tree)
        buffers = inventory.read_buffers()
        copies = self._buffer_copies.take(step, buffers, inventory.always) if buffers else {}
        self._generators.keep(step)
        self._generators.by_step.pop(step - 2, None)
        self._small[step] = _Small(tree, copies, others)
        self._small.pop(step - 2, None)
        versions = versions_of(tensors)
        self._live = _Big(step, self._generation, parameters, states, tensors, versions)
        self._dirty = False
        self._num_stepped = 0
        self._sequence = None
        if inventory.scalers:
            self._scalers_seen = _scaler_marks(inventory)

    def _read_big(
        self, inventory: Inventory, tree: dict[str, Node]
    ) -> tuple[Tensors, Tensors, list[Tensor]]:
        for entry in inventory.optimizers:
            tree[entry.name] = entry.read()
        # By identity, not by what read() says has moved: others may have read since.
        sources = [entry.states for entry in inventory.optimizers]
        if self._big_cache is None or not all(map(is_, sources, self._big_sources)):
            states = {key: t for source in sources for key, t in source.items()}
            tensors = [*inventory.parameters.values(), *states.values()]
            self._big_cache = (inventory.parameters, states, tensors)
            self._big_sources = sources
        return self._big_cache

    def _scalers_moved(self) -> bool:
        inventory = self._inventory
        if inventory is None or not inventory.scalers:
            return False
        marks = _scaler_marks(inventory)
        return any(
            now != seen and (seen is not None or now[1] > 0)
            for now, seen in zip(marks, self._scalers_seen, strict=True)
        )

    # ------------------------------------------------------------ what is held

    def _held(self, step: int) -> _Big | None:
        live, undo = self._live, self._undo
        if live is not None and live.step == step and not self._dirty and live.is_unchanged():
            return live
        if undo is not None and undo.step == step and step in self._small and undo.is_unchanged():
            return undo
        return None

    def holdings(self) -> tuple[Holding, ...]:
        """The steps that this process can give, newest first. Ends the entry.

        It also lets go of the user's objects, which may hold the generation's groups open.
        """
        found = []
        live, undo = self._live, self._undo
        if live is not None and self._held(live.step) is live:
            found.append(Holding(live.step, "live", live.generation))
        steps = [holding.step for holding in found]
        if undo is not None and undo.step not in steps and self._held(undo.step) is undo:
            found.append(Holding(undo.step, "undo", undo.generation))
        if self.checkpoint_directory is not None and found:
            self._generators.leave(_disk(), self.checkpoint_directory, self._rank)
        self.release()
        return tuple(found)

    def _image(self, step: int) -> Image:
        big = self._held(step)
        if big is None:
            raise CheckpointMissing(f"rank {self._rank} does not hold step {step}", step=step)
        small = self._small[step]
        return Image(step, small.tree, big.parameters, small.buffers, big.states, small.others)

    # ------------------------------------------------------------ the disk

    def persist(self, step: int, directory: str, wait: bool = False) -> None:
        """Writes a step that this process holds to disk.

        In the background (wait=False) every rank calls it at the same commit: rank 0 copies the
        state and writes the copy, the others leave their generators. With wait=True one rank alone
        is asked, whichever it is, and it returns when the checkpoint is durable; generators that a
        rank did not leave in time are missing in it.

        Raises:
            CheckpointMissing: the step is not held.
            OSError: the storage refuses (wait=True; else it is noted).
        """
        disk = _disk()
        self.checkpoint_directory = directory
        if self._checkpoints is None:
            published = self.page.set_persisted if self.page is not None else None
            self._checkpoints = disk.Checkpoints(directory, note=self._note, published=published)
        if not wait:
            image = None
            if self._rank == 0:
                if self._checkpoints.is_busy():
                    self._note(f"checkpoint of step {step} is skipped: the last is still written")
                    return
                image = self._image(step).on_cpu()
            rng = self._generators.by_step[step]
            self._checkpoints.start(step, self._rank, self._world_size, rng, image)
            return
        self._checkpoints.enter()
        self._checkpoints.wait_idle()
        if disk.newest_complete(directory) != step:
            if step in self._generators.by_step:
                disk.write_rng(directory, step, self._rank, self._generators.by_step[step])
            self._checkpoints.finish(self._image(step), self._world_size)

    def _progress(self) -> None:
        if self.page is not None:
            self.page.progress()


def _scaler_marks(inventory: Inventory) -> list[Any]:
    """What scaler.update() moves: identity and version of its scale (None: not made yet)."""
    scales = [getattr(scaler, "_scale", None) for scaler in inventory.scalers]
    return [None if scale is None else (id(scale), scale._version) for scale in scales]


def _no_group() -> None:
    return None


def _disk() -> Any:
    """DCP takes a while to import: only jobs with a checkpoint directory pay for it."""
    from resilient.state import disk

    return disk
