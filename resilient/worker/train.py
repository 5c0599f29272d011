"""`@resilient.train`: the loop that enters the train function once for each generation.

The process stays, and so do its imports, its data and its state; what ends with a generation is the
train function's frame and the process groups. The order on the way out is what recovery time is
made of: report first, so that the agent can decide; then take the old generation apart while it
does; then wait for the next plan.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, overload

from resilient import wire
from resilient.core.model import Cut, CutKind
from resilient.errors import ConfigError, Interrupted
from resilient.page import Activity, Page
from resilient.state.protect import Protected
from resilient.worker import failure, groups
from resilient.worker.drill import Drills
from resilient.worker.job import Job
from resilient.worker.lifetime import Checkpoints, Entry, Lifetime, NoAgent
from resilient.worker.link import AgentLink

CHECKPOINT_VARIABLE = "RESILIENT_CHECKPOINT"

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def train(fn: Function) -> Function: ...


@overload
def train(
    fn: None = None,
    *,
    exact: bool = False,
    parallel: Any = None,
    init_process_group: bool = True,
) -> Callable[[Function], Function]: ...


def train(
    fn: Any = None,
    *,
    exact: bool = False,
    parallel: Any = None,
    init_process_group: bool = True,
) -> Any:
    """Makes `fn(job, ...)` recoverable: call it without the job, once, at the end of the script.

    The call returns when every rank's function has returned. Until then the function may be entered
    again, in the same process, after a fault anywhere; whatever it does outside of steps (opening
    files, printing) then happens again.

    Args:
        exact: reserved; refused until it keeps its promise.
        parallel: reserved, likewise.
        init_process_group: False: the function makes its groups itself, from the environment.
    """
    options = {"exact": exact, "parallel": parallel, "init_process_group": init_process_group}
    if fn is None:
        return functools.partial(train, **options)

    @functools.wraps(fn)
    def main(*args: Any, **kwargs: Any) -> None:
        def call(job: Job) -> None:
            fn(job, *args, **kwargs)

        try:
            _check_options(exact, parallel)
            _run(call, init_process_group)
        except ConfigError as error:
            # A mistake to be mended, not a crash to be studied: where and what, in one line.
            frame = failure.describe(error).frame
            print(f"resilient: {frame + ': ' if frame else ''}{error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None

    return main


def _check_options(exact: bool, parallel: Any) -> None:
    if exact:
        raise ConfigError(
            "exact=True is not available yet; leave it out: at an unchanged world size a recovery "
            "is bitwise exact without it"
        )
    if parallel is not None:
        raise ConfigError("parallel= is not available yet; leave it out: training is data parallel")


_was_called = False


def _run(call: Callable[[Job], None], init_process_group: bool) -> None:
    global _was_called
    link = AgentLink.from_environment()
    if link is None:
        if _was_called:
            raise ConfigError("the decorated function was called a second time: call it once")
        _run_alone(call, init_process_group)
        return
    _was_called = True
    worker = _Worker(link, call, init_process_group)
    try:
        worker.run()
    finally:
        link.restore_signals()


# ---------------------------------------------------------------- without an agent


def _run_alone(call: Callable[[Job], None], init_process_group: bool) -> None:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" in os.environ and rank == 0:
        print(
            "resilient: launched without resilient-run: this trains as usual, but a fault ends the "
            "job instead of being recovered",
            file=sys.stderr,
            flush=True,
        )
    link = NoAgent()
    protected = Protected(link.page, note=_note)
    lifetime = Lifetime(link, protected, Drills(None), first_world_size=world_size)
    device = groups.pick_device(local_rank)
    if init_process_group and "RANK" in os.environ:
        groups.join_from_environment(device)
    elif init_process_group:
        groups.join_alone(device)
    entry = Entry(0, rank, local_rank, world_size, Cut(CutKind.INITIAL, 0))
    job = Job(lifetime, entry, device)
    try:
        call(job)
        job._finish()
    finally:
        job._close()
        groups.leave()


# ---------------------------------------------------------------- with one


class _Worker:
    """The training thread of a process that has an agent."""

    def __init__(
        self, link: AgentLink, call: Callable[[Job], None], init_process_group: bool
    ) -> None:
        self._link = link
        self._call = call
        self._init_process_group = init_process_group
        protected = Protected(link.page, note=_note)
        self._lifetime = Lifetime(link, protected, Drills(link.page), checkpoints=_checkpoints())
        self._error: BaseException | None = None  # of the newest generation, if it was our own

    def run(self) -> None:
        """Enters generations until the agent says that it is over.

        Raises:
            SystemExit: the job has failed, or is drained.
            BaseException: the train function's own error, when that ended the job.
        """
        link = self._link
        link.open()
        link.page.act(Activity.WAITING)
        self._look_at_disk()
        link.send(wire.Ready(persisted_step=self._persisted_step()))
        while True:
            order, predecessor = link.next_order()
            if isinstance(order, wire.Start):
                self._enter(order, predecessor)
            elif isinstance(order, wire.Persist):
                self._persist(order)
            elif isinstance(order, wire.Look):
                self._look_again()
            else:
                link.page.act(Activity.STARTING)  # from here on, as long as the script likes
                groups.leave()
                self._lifetime.loaders.close()
                if isinstance(order, wire.Close):
                    return
                self._stop(order)

    def _stop(self, order: wire.Stop) -> NoReturn:
        if self._error is not None:
            raise self._error
        sys.exit(order.exit_code)

    # ------------------------------------------------------------ one generation

    def _enter(self, start: wire.Start, predecessor: Page | None) -> None:
        """Runs the train function once, and answers the Start with exactly one report."""
        link, lifetime = self._link, self._lifetime
        groups.leave()  # those of a finished function, kept until now for its peers' sake
        self._error = None
        link.release()  # a plan is made only when every rank has reported, or is dead
        link.enter(start.generation, (start.store_host, start.store_port), start.world_size)
        link.page.enter(start.generation)
        lifetime.drills.arm(start.drills, rank=start.rank, generation=start.generation)
        job = None
        try:
            job = self._join(start, predecessor)
            self._call(job)
            job._finish()
        except BaseException as error:
            self._report(start, job, error)
            self._clean_up(job, error)
        else:
            self._finished(start, job)
        finally:
            if predecessor is not None:
                predecessor.close()
        lifetime.drills.reached("waiting", lifetime.step)

    def _join(self, start: wire.Start, predecessor: Page | None) -> Job:
        link, lifetime = self._link, self._lifetime
        link.page.act(Activity.JOINING)
        os.environ.update(start.environment)
        lifetime.first_world_size = start.first_world_size or start.world_size
        self._prepare(start)
        device = lifetime.device or groups.pick_device(start.local_rank)
        lifetime.device = device
        lifetime.drills.reached("joining", lifetime.step)

        def check() -> None:
            if link.is_aborted(start.generation):
                raise Interrupted(f"generation {start.generation} has ended")

        check()
        store = groups.connect(start.store_host, start.store_port, check)
        if self._init_process_group:
            groups.join(store, start.rank, start.world_size, device)
            check()
        link.page.act(Activity.BUILDING)
        link.send(wire.Joined(start.generation))
        entry = Entry(
            start.generation,
            start.rank,
            start.local_rank,
            start.world_size,
            start.cut,
            predecessor,
        )
        return Job(lifetime, entry, device)

    def _prepare(self, start: wire.Start) -> None:
        """Random numbers and what was built, for a beginning or a beginning anew."""
        lifetime = self._lifetime
        if start.cut.kind is CutKind.MEMORY:
            return
        if start.cut.kind is CutKind.DISK:
            return
        if lifetime.first_random_state is None:
            lifetime.first_random_state = lifetime.random_state.read()
        else:
            lifetime.random_state.write(lifetime.first_random_state)
        lifetime.builds.drop()
        lifetime.step = 0
        lifetime.page.set_step(0)

    # ------------------------------------------------------------ the way out

    def _report(self, start: wire.Start, job: Job | None, error: BaseException) -> None:
        """Tells the agent first; what a dead peer's silence costs the others comes after."""
        link, lifetime = self._link, self._lifetime
        holdings = lifetime.protected.holdings()
        lifetime.drills.reached("stopping", lifetime.step)
        if link.is_aborted(start.generation):
            report: wire.Message = wire.Interrupted(
                start.generation, lifetime.step, holdings, self._persisted_step()
            )
        else:
            failure.strip_own_frames(error)
            links_lost = job is not None and job._links_lost()
            in_collective = failure.is_in_collective(error, links_lost)
            if not in_collective:
                self._error = error  # raised again, should it be what ends the job
            report = wire.Failed(
                start.generation,
                lifetime.step,
                failure.describe(error),
                in_collective,
                holdings,
                self._persisted_step(),
            )
        link.send(report)
        link.page.act(Activity.WAITING)

    def _clean_up(self, job: Job | None, error: BaseException) -> None:
        """Takes the generation apart; what is left of it must not outlive this call."""
        self._link.sever()  # by ourselves after a failure: nothing here may block any more
        if job is not None:
            job._close()
        failure.clear(error)
        if self._error is None:
            error.__traceback__ = None
        groups.leave()
        self._link.leave()

    def _finished(self, start: wire.Start, job: Job) -> None:
        link, lifetime = self._link, self._lifetime
        # The groups stay: a peer's last collective may still read what we have sent.
        link.leave()
        job._close()
        holdings = lifetime.protected.holdings()
        persisted = self._persisted_step()
        link.page.act(Activity.FINISHED)
        link.send(wire.Finished(start.generation, lifetime.step, holdings, persisted))

    # ------------------------------------------------------------ the disk

    def _look_at_disk(self) -> None:
        checkpoints = self._lifetime.checkpoints
        if checkpoints is None:
            return
        # Imported only where it is needed: torch's checkpoint package takes a while.
        from resilient.state.disk import newest_complete

        self._lifetime.protected.checkpoint_directory = checkpoints.directory
        step = newest_complete(checkpoints.directory, _note)
        if step is not None:
            self._link.page.set_persisted(step)

    def _look_again(self) -> None:
        """The agent asks, since ranks of other nodes may have written a checkpoint since."""
        note = ""
        try:
            self._look_at_disk()
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
        self._link.send(wire.Persisted(self._persisted_step(), note))

    def _persisted_step(self) -> int | None:
        return self._link.page.read().persisted_step

    def _persist(self, order: wire.Persist) -> None:
        link, checkpoints = self._link, self._lifetime.checkpoints
        if checkpoints is None:
            link.send(wire.Persisted(None, "the job has no checkpoint directory"))
            return
        link.page.act(Activity.PERSISTING)
        try:
            self._lifetime.protected.persist(order.step, checkpoints.directory, wait=True)
        except Exception as error:
            link.send(wire.Persisted(None, f"{type(error).__name__}: {error}"))
        else:
            link.send(wire.Persisted(order.step))
        link.page.act(Activity.WAITING)


def _checkpoints() -> Checkpoints | None:
    directory, _, every = os.environ.get(CHECKPOINT_VARIABLE, "").rpartition(",")
    return Checkpoints(directory, int(every)) if directory else None


def _note(line: str) -> None:
    print(f"resilient: {line}", file=sys.stderr, flush=True)
