"""One simulated worker: what the real one does as seen from its agent, and what it really holds.

The one idea: a copy of the state is a node of the tree in content.py together with the generation
that made it, so that a checker can tell what an agent only believes. All a process does by itself
goes through `later`, which a stuck process does not reach, a dead one never and a frozen host only
when it thaws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from resilient.core import events as ev
from resilient.core.model import ErrorInfo, Holding, Plan, Slot, Worker

if TYPE_CHECKING:
    from resilient.sim.agent import Agent
    from resilient.sim.worlds import World

COLLECTIVE_ERROR = ErrorInfo("builtins.RuntimeError", "train.py:9 in step")

Copy = tuple[int, int]
"""(content, the generation whose restore or commit made it what it is)."""


class Process:
    """stage: starting, ready, entered, joined, training, finished, gone.

    Attributes:
        live, undo: the copies it holds; None: none that is whole.
        dirty: the optimizer has begun, the step is not committed.
        stuck: does nothing by itself any more; `stopped`: the kernel has it stopped.
        doomed: its exit is on the way.
        told: newest generation that its agent has told it to enter.
        progress_s: last sign of progress, in true time.
    """

    def __init__(self, agent: Agent, worker: Worker, slot: Slot | None) -> None:
        self.agent = agent
        self.cluster = agent.cluster
        self.worker = worker
        self.slot = slot
        self.stage = "starting"
        self.generation = -1
        self.told = -1
        self.world: World | None = None
        self.live: Copy | None = None
        self.undo: Copy | None = None
        self.dirty = False
        self.leaving = False
        self.aborted = -1
        self.stuck = False
        self.stopped = False
        self.unkillable = False
        self.doomed = False
        self.closing = False
        self.error: ErrorInfo | None = None
        self.step = 0
        self.persisted: int | None = None
        self.told_persisted: int | None = None
        self.progress_s = self.cluster.timeline.now_s
        self._next_plan: Plan | None = None
        self._stepped = -1

    # ------------------------------------------------------------ life

    @property
    def inside(self) -> bool:
        return self.stage in ("entered", "joined", "training")

    @property
    def acts(self) -> bool:
        """It runs, and could take part in a collective now."""
        return not (self.stuck or self.doomed or self.stage == "gone" or self.agent.host.is_frozen)

    def is_due(self, generation: int) -> bool:
        """It is to show progress: inside that generation, or told to enter it and not there yet."""
        if self.stage == "gone" or self.told != generation:
            return False
        return self.generation < generation or (self.inside and self.generation == generation)

    def later(self, delay_s: float, action: Callable[[], None], *, forced: bool = False) -> None:
        """forced: done to it, so that being stuck does not help."""

        def act() -> None:
            if self.stage != "gone" and (forced or not self.stuck):
                action()

        self.agent.host.later(delay_s, act)

    def say(self, event: ev.Event) -> None:
        told = getattr(event, "persisted_step", None)
        if told is not None and self.agent.runs:
            self.told_persisted = told
        self.agent.see(event)

    def start(self, delay_s: float) -> None:
        self.later(delay_s, self._ready)

    def _ready(self) -> None:
        if self.stage == "starting" and not self.doomed:
            self.stage = "ready"
            self.persisted = self.cluster.newest_on_disk()
            self.say(ev.WorkerReady(self.worker, self.persisted))

    def exit(self, status: int) -> None:
        if self.stage == "gone":
            return
        self.stage = "gone"
        if self.world is not None:
            self.world.lose(self, silent=False)
        self.say(ev.WorkerExited(self.worker, status, self.step, self.persisted))

    def exit_later(self, status: int, delay_s: float) -> None:
        self.doomed = True
        self.later(delay_s, lambda: self.exit(status), forced=True)

    def kill(self) -> None:
        if self.unkillable:
            self.stuck = True
        else:
            self.exit_later(-9, self.cluster.rng.uniform(0.001, 0.05))

    def terminate(self, signum: int) -> None:
        self.later(self.cluster.rng.uniform(0.001, 0.3), lambda: self.exit(-signum))

    def close(self, status: int) -> None:
        """main() returns, or exits."""
        self.closing = True
        self.later(self.cluster.rng.uniform(0.01, 0.5), lambda: self.exit(status))

    # ------------------------------------------------------------ a generation

    def enter(self, plan: Plan) -> None:
        """An order to enter; one that comes too early waits until the process has come out."""
        self.later(self.cluster.rng.uniform(0.001, 0.02), lambda: self._take(plan))

    def _take(self, plan: Plan) -> None:
        if self.inside:
            self._next_plan = plan
        elif self.stage in ("ready", "finished") and not self.doomed:
            self._enter(plan)

    def _enter(self, plan: Plan) -> None:
        self._next_plan = None
        self.stage, self.generation, self.leaving = "entered", plan.generation, False
        self.progress()
        self.world = self.cluster.world(plan)
        self.world.entered(self)
        if self.aborted >= plan.generation:
            self.later(0.001, self._leave)

    def progress(self) -> None:
        self.progress_s = self.cluster.timeline.now_s

    def restored(self, content: int) -> None:
        self.live, self.undo, self.dirty = (content, self.generation), None, False
        self.step = self.cluster.contents.steps[content]
        self.stage = "training"
        self.progress()
        self.say(ev.WorkerRestored(self.worker, self.generation))

    def begin_step(self) -> None:
        """The optimizer changes the parameters."""
        if self.cluster.settings.keeps_undo:
            self.undo = self.live
        self.dirty = True

    def commit(self) -> None:
        """The step that has begun is committed."""
        assert self.live is not None and self.world is not None
        content = self.cluster.contents.commit(self.live[0], self.generation)
        self.live, self.dirty = (content, self.generation), False
        self.step += 1
        self.progress()
        self.world.persisted(self)
        if self._stepped != self.generation:
            self._stepped = self.generation
            self.say(ev.WorkerStepped(self.worker, self.generation, self.step))
            self.agent.measure_pace(self.generation)
        if self.leaving:
            self._leave()
        else:
            self.finish_if_done()

    def finish_if_done(self) -> None:
        length = self.cluster.length
        if self.stage == "training" and length is not None and self.step >= length:
            self.stage = "finished"
            event = ev.WorkerFinished(
                self.worker, self.generation, self.step, self.holdings(), self.persisted
            )
            self.say(event)

    def holdings(self) -> tuple[Holding, ...]:
        """What it would report, coming out now."""
        steps = self.cluster.contents.steps
        found = []
        if self.live is not None and not self.dirty:
            found.append(Holding(steps[self.live[0]], "live", self.live[1]))
        if self.undo is not None and not (found and found[0].step == steps[self.undo[0]]):
            found.append(Holding(steps[self.undo[0]], "undo", self.undo[1]))
        return tuple(found)

    def copies(self) -> list[Copy]:
        """What it really holds, whole."""
        live = [self.live] if self.live is not None and not self.dirty else []
        return live + ([self.undo] if self.undo is not None else [])

    def copy_at(self, step: int) -> int | None:
        """The content of its copy of that step."""
        for content, _ in self.copies():
            if self.cluster.contents.steps[content] == step:
                return content
        return None

    # ------------------------------------------------------------ the way out

    def abort(self, generation: int) -> None:
        """Its agent says: leave that generation."""
        rng = self.cluster.rng

        def seen() -> None:
            self.aborted = max(self.aborted, generation)
            if self.inside and self.generation <= generation:
                delay_s = rng.uniform(0.001, 0.05 if rng.random() < 0.9 else 0.3)
                if self.cluster.settings.sloppy and rng.random() < 0.03:
                    delay_s = rng.uniform(2.0, 20.0)
                self.later(delay_s, self._leave)

        self.later(0.001, seen)

    def _leave(self) -> None:
        if not self.inside or self.aborted < self.generation or self.doomed:
            return
        if self.dirty and not self.cluster.settings.late_collective:
            self.leaving = True  # nothing interrupts it there: it commits first
            return
        self._come_out()
        event = ev.WorkerInterrupted(
            self.worker, self.generation, self.step, self.holdings(), self.persisted
        )
        self._out(event)

    def fail(self, error: ErrorInfo, *, in_collective: bool) -> None:
        """The train function raises, unless an abort is what it meets."""
        if not self.inside or self.doomed:
            return
        if self.aborted >= self.generation:
            self._leave()
            return
        if self.dirty and not self.cluster.settings.late_collective:
            return  # not in a collective: it meets the broken one after the commit
        self._come_out()
        event = ev.WorkerFailed(
            self.worker,
            self.generation,
            self.step,
            error,
            in_collective,
            self.holdings(),
            self.persisted,
        )
        self._out(event)

    def _come_out(self) -> None:
        if self.dirty:
            self.live, self.dirty = None, False
        self.stage, self.leaving = "ready", False
        self.progress()

    def _out(self, event: ev.Event) -> None:
        assert self.world is not None
        world = self.world
        self.say(event)
        world.lose(self, silent=False)
        if self._next_plan is not None:
            plan = self._next_plan
            self.later(0.001, lambda: self._take(plan))

    # ------------------------------------------------------------ the disk

    def look(self) -> None:
        def done() -> None:
            self.persisted = self.cluster.newest_on_disk()
            self.say(ev.Persisted(self.worker, self.persisted))

        self.later(self.cluster.rng.uniform(0.002, 0.05), done)

    def persist(self, step: int) -> None:
        rng = self.cluster.rng
        content = self.copy_at(step)

        def done() -> None:
            if content is None or rng.random() < 0.1:
                self.say(ev.Persisted(self.worker, None, "disk full"))
                return
            self.cluster.write_disk(step, content)
            self.persisted = step
            self.say(ev.Persisted(self.worker, step))

        self.later(rng.choice([0.3, 3.0]), done)
