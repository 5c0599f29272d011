"""`@resilient.train`: the loop that enters the train function once for each generation.

The process stays, and so do its imports, its data and its state; what ends with a generation is the
train function's frame and the process groups. The order on the way out is what recovery time is made
of: report first, so that the agent can decide; then take the old generation apart while it does;
then wait for the next plan.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload


from resilient import wire
from resilient.core.model import Cut, CutKind
from resilient.errors import ConfigError, Interrupted
from resilient.page import Activity, Page
from resilient.state.disk import newest_complete
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
    if exact:
        raise ConfigError(
            "exact=True is not available yet: at an unchanged world size a recovery is bitwise exact "
            "without it; leave it out"
        )
    if parallel is not None:
        raise ConfigError("parallel= is not available yet: only data parallel training is; leave it out")
    if fn is None:
        return functools.partial(train, init_process_group=init_process_group)

    @functools.wraps(fn)
    def main(*args: Any, **kwargs: Any) -> None:
        call = functools.partial(_call, fn, args, kwargs)
        _run(call, init_process_group)

    return main


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, job: Job) -> None:
    fn(job, *args, **kwargs)


_agent: AgentLink | None = None
_closed = False


def _run(call: Callable[[Job], None], init_process_group: bool) -> None:
    global _agent, _closed
    if _closed:
        raise ConfigError("the decorated function was called a second time: call it once in a script")
    if _agent is not None:
        raise ConfigError("the decorated function called itself: call it once, from the script")
    link = AgentLink.from_environment()
    if link is None:
        _run_alone(call, init_process_group)
        return
    _agent = link
    worker = _Worker(link, call, init_process_group)
    try:
        worker.run()
    finally:
        _closed = True
        link.restore_signals()


# ---------------------------------------------------------------- without an agent


def _run_alone(call: Callable[[Job], None], init_process_group: bool) -> None:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" in os.environ and rank == 0:
        print(
            "resilient: launched without resilient-run: training goes on as usual, but a fault ends "
            "the job instead of being recovered",
            file=sys.stderr,
            flush=True,
        )
    link = NoAgent()
    lifetime = Lifetime(link, Protected(link.page), Drills(None), first_world_size=world_size)
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
        self._lifetime = Lifetime(
            link, Protected(link.page), Drills(link.page), checkpoints=_checkpoints()
        )
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
        link.send(wire.Ready(persisted_step=self._persisted_step()))
        while True:
            order, predecessor = link.next_order()
            if isinstance(order, wire.Start):
                self._enter(order, predecessor)
            elif isinstance(order, wire.Persist):
                self._persist(order)
            else:
                self._leave_groups()
                if isinstance(order, wire.Close):
                    return
                self._stop(order)

    def _stop(self, order: wire.Stop) -> None:
        if self._error is not None:
            failure.strip_own_frames(self._error)
            raise self._error
        sys.exit(order.exit_code)

    # ------------------------------------------------------------ one generation

    def _enter(self, start: wire.Start, predecessor: Page | None) -> None:
        """Runs the train function once, and answers the Start with exactly one report."""
        link, lifetime = self._link, self._lifetime
        self._leave_groups()  # those of a finished function, kept until now for its peers' sake
        self._error = None
        link.enter(start.generation, start.store_port, start.world_size)
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
            self._finished(start)
        finally:
            if predecessor is not None:
                predecessor.close()
        lifetime.drills.reached("waiting", lifetime.step)

    def _join(self, start: wire.Start, predecessor: Page | None) -> Job:
        link, lifetime = self._link, self._lifetime
        link.page.act(Activity.JOINING)
        os.environ.update(start.environment)
        self._prepare(start)
        device = lifetime.device or groups.pick_device(start.local_rank)
        lifetime.device = device
        lifetime.drills.reached("joining", lifetime.step)

        def check() -> None:
            if link.is_aborted(start.generation):
                raise Interrupted(f"generation {start.generation} has ended")

        check()
        if self._init_process_group:
            groups.join(
                host=start.store_host,
                port=start.store_port,
                rank=start.rank,
                world_size=start.world_size,
                device=device,
                check=check,
            )
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
        if lifetime.first_world_size is None:
            lifetime.first_world_size = start.world_size
        if start.cut.kind is not CutKind.INITIAL:
            return
        if lifetime.first_random_state is None:
            lifetime.first_random_state = lifetime.random_state.read()
        else:
            lifetime.random_state.write(lifetime.first_random_state)
        lifetime.first_world_size = start.world_size
        lifetime.builds.drop()
        lifetime.step = 0
        lifetime.page.set_step(0)

    # ------------------------------------------------------------ the way out

    def _report(self, start: wire.Start, job: Job | None, error: BaseException) -> None:
        """Tells the agent first; what a dead peer's silence costs the others comes after."""
        link, lifetime = self._link, self._lifetime
        holdings = lifetime.protected.holdings()
        if link.is_aborted(start.generation):
            lifetime.drills.reached("stopping", lifetime.step)
            report: wire.Message = wire.Interrupted(
                start.generation, lifetime.step, holdings, self._persisted_step()
            )
        else:
            self._error = error
            links_lost = job is not None and job._links_lost()
            report = wire.Failed(
                start.generation,
                lifetime.step,
                failure.describe(error),
                failure.is_in_collective(error, links_lost),
                holdings,
                self._persisted_step(),
            )
        link.send(report)
        link.page.act(Activity.WAITING)

    def _clean_up(self, job: Job | None, error: BaseException) -> None:
        """Takes the generation apart; what is left of it must not outlive this call."""
        self._link.sever()  # by ourselves after a failure, so that the peers wake
        if job is not None:
            job._close()
        failure.clear(error)
        if self._error is None:
            error.__traceback__ = None
        groups.leave()
        self._link.leave()

    def _finished(self, start: wire.Start) -> None:
        link, lifetime = self._link, self._lifetime
        # The groups stay: a peer's last collective may still read what we have sent.
        link.leave()
        holdings = lifetime.protected.holdings()
        persisted = self._persisted_step()
        link.page.act(Activity.FINISHED)
        link.send(wire.Finished(start.generation, lifetime.step, holdings, persisted))

    def _leave_groups(self) -> None:
        groups.leave()

    # ------------------------------------------------------------ the disk

    def _persisted_step(self) -> int | None:
        checkpoints = self._lifetime.checkpoints
        return None if checkpoints is None else newest_complete(checkpoints.directory)

    def _persist(self, order: wire.Persist) -> None:
        link, lifetime = self._link, self._lifetime
        if lifetime.checkpoints is None:
            link.send(wire.Persisted(None, "there is no checkpoint directory"))
            return
        link.page.act(Activity.PERSISTING)
        try:
            lifetime.protected.persist(order.step, lifetime.checkpoints.directory, wait=True)
        except Exception as error:
            link.send(wire.Persisted(None, f"{type(error).__name__}: {error}"))
        else:
            link.send(wire.Persisted(order.step))
        link.page.act(Activity.WAITING)


def _checkpoints() -> Checkpoints | None:
    value = os.environ.get(CHECKPOINT_VARIABLE, "")
    directory, _, every = value.rpartition(",")
    return Checkpoints(directory, int(every)) if directory else None
