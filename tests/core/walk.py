"""A random but plausible life of one node, drawn from a seed, with the coordinator in charge.

Processes that start, join, restore, step, hang, raise, die, ignore signals and answer late; stores
that open; messages that come twice. First it hurts; then nothing more goes wrong, and the job has
to come to an end in bounded time. `run(seed)` checks every decision and gives the trace.

    python -m tests.core.walk SEED        prints the trace of one seed
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.model import (
    Config,
    CutKind,
    ErrorInfo,
    Holding,
    Phase,
    Plan,
    Slot,
    Status,
    Worker,
)
from tests.core.scenario import show_effect

NODE = "n0"
HURT_S = 600.0
BOUND_S = 1500.0  # from the last fault to the end
HANG_S = 30.0
LAST_STEP = 10_000


@dataclass
class Process:
    """stage: starting, ready, joining, restoring, training, finished, gone."""

    stage: str = "starting"
    generation: int = -1
    step: int = 0
    holdings: tuple[Holding, ...] = ()
    dirty: bool = False
    stuck: bool = False
    unkillable: bool = False
    doomed: bool = False  # its exit is on the way


@dataclass
class Walk:
    """One run. `told` are the events on their way to the coordinator, by time."""

    seed: int
    rng: random.Random = field(init=False)
    now_s: float = 0.0
    processes: dict[Worker, Process] = field(default_factory=dict)
    told: list[tuple[float, int, Any]] = field(default_factory=list)
    count: int = 0
    plan: Plan | None = None
    published: Plan | None = None
    stalled_s: float | None = None
    disk: int | None = None
    trace: list[str] = field(default_factory=list)
    num_starts: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.num_slots = rng.choice([1, 2, 3, 4])
        self.config = Config(
            min_world_size=rng.choice([1, 1, 1, 2]) if self.num_slots > 1 else 1,
            num_spares=rng.choice([0, 1, 1, 2]),
            replace=rng.random() < 0.8,
            persists=rng.random() < 0.5,
            max_restarts=rng.choice([0, 1, 3]),
        )
        self.plain = rng.random() < 0.1  # an unmodified script
        self.state = coordinator.initial(self.config)
        self.wake_s: float | None = None
        # A swarm: each run has its own kinds of trouble.
        kinds = ["kill", "raise", "stick", "spare", "health", "two", "collective"]
        self.kinds = sorted(rng.sample(kinds, rng.randint(1, 4)))
        self.gap_s = rng.choice([2.0, 10.0, 30.0, 60.0])
        self.drain_s = rng.uniform(0, HURT_S) if rng.random() < 0.2 else None
        self.sloppy = rng.random() < 0.5  # late answers, ignored signals, stuck starts
        self.length = rng.choice([5, LAST_STEP])

    # ------------------------------------------------------------ time and messages

    def tell(self, delay_s: float, event: Any) -> None:
        self.count += 1
        heapq.heappush(self.told, (self.now_s + delay_s, self.count, event))

    def soon(self) -> float:
        return self.rng.uniform(0.001, 0.3)

    def run(self) -> list[str]:
        self.tell(0.0, ev.NodeJoined(NODE, self.num_slots))
        self.tell(self.gap_s, "trouble")
        self.tell(0.5, "step")
        if self.drain_s is not None:
            self.tell(self.drain_s, ev.DrainRequested(15))
            if self.rng.random() < 0.3:
                self.tell(self.drain_s + 10, ev.DrainRequested(15, force=True))
        while not self.state.finished:
            assert self.now_s < HURT_S + BOUND_S, f"not over: {self.state.phase} {self.state}"
            time_s, _, event = self.told[0] if self.told else (float("inf"), 0, None)
            if self.wake_s is not None and self.wake_s <= time_s:
                self.now_s = max(self.now_s, self.wake_s)
                self.decide(ev.TimePassed())
                continue
            assert event is not None, f"waits for ever: {self.state.phase} {self.state}"
            heapq.heappop(self.told)
            self.now_s = time_s
            if isinstance(event, str):
                getattr(self, f"_{event}")()
            elif callable(event):
                event()
            elif self._is_sent(event):
                self.decide(event)
        for worker, process in self.processes.items():
            assert process.stage == "gone" or process.unkillable, f"{worker} was left running"
        return self.trace

    def _is_sent(self, event: Any) -> bool:
        """A dead process says nothing but that it is dead."""
        if isinstance(event, ev.WorkerExited):
            self.processes[event.worker].stage = "gone"
        return True

    # ------------------------------------------------------------ the coordinator

    def decide(self, event: ev.Event) -> None:
        before = self.state
        decision = coordinator.step(before, event, self.now_s)
        self.state, self.wake_s = decision.state, decision.wake_s
        shown = ", ".join(show_effect(effect) for effect in decision.effects)
        self.trace.append(
            f"{self.now_s:.3f} {event} -> {self.state.phase.value} wake={self.wake_s} [{shown}]"
        )
        self._check(before.plan, decision)
        for effect in decision.effects:
            getattr(self, f"_do_{type(effect).__name__}")(effect)
        once = isinstance(event, (ev.DrainRequested, ev.NodeJoined))
        if self.rng.random() < 0.03 and not once:
            self.tell(self.rng.choice([0.0, 0.2, 40.0]), event)  # it comes twice

    def _check(self, old_plan: Plan | None, decision: ev.Decision) -> None:
        state = decision.state
        assert decision.wake_s is None or decision.wake_s > self.now_s, "it would spin"
        said = decision.reason.split("; ")
        assert len(set(said)) == len(said), f"said twice: {decision.reason}"
        if state.phase in (Phase.STOPPING, Phase.COLLECTING):
            assert decision.wake_s is not None, "waits without a bound"
        if state.phase is Phase.CLOSED and not state.finished and state.outcome is not None:
            assert decision.wake_s is not None or state.outcome.value == "done"
        if state.phase is Phase.COLLECTING and old_plan is not None:
            for member in old_plan.members:
                process, known = self.processes[member.worker], state.workers.get(member.worker)
                inside = process.stage in ("joining", "restoring", "training")
                assert not inside or known is None or known.killed or process.doomed, (
                    "a verdict before every rank has reported or is dead"
                )
        plan = None
        for effect in decision.effects:
            match effect:
                case ev.PublishPlan():
                    plan = effect.plan
                    self._check_plan(plan)
                case ev.StartGeneration():
                    assert effect.plan is plan, "started what was not published before"
                case ev.StartWorker() if effect.slot is not None:
                    assert effect.slot not in state.excluded
                    assert effect.worker not in self.processes
        if not state.finished:
            for worker in state.workers:
                assert worker in self.processes or any(
                    isinstance(e, ev.StartWorker) and e.worker == worker for e in decision.effects
                )

    def _check_plan(self, plan: Plan) -> None:
        if self.published is not None:
            assert plan.generation > self.published.generation, "generations only grow"
        self.published = plan
        workers = [member.worker for member in plan.members]
        slots = [member.slot for member in plan.members]
        assert [member.rank for member in plan.members] == list(range(len(workers)))
        assert len(set(workers)) == len(set(slots)) == len(workers)
        assert len(workers) >= self.config.min_world_size
        assert not set(slots) & self.state.excluded
        for worker in workers:
            process = self.processes[worker]
            assert self.state.workers[worker].status is Status.ENTERED
            assert not self.state.workers[worker].killed
            assert process.stage in ("ready", "finished", "gone"), "entered before it had left"
        held = {m.rank: {h.step for h in self.processes[m.worker].holdings} for m in plan.members}
        newest = max((step for steps in held.values() for step in steps), default=None)
        if plan.cut.kind is CutKind.MEMORY:
            assert plan.cut.step == newest
            assert plan.cut.holders == tuple(r for r in sorted(held) if newest in held[r])
        elif plan.cut.kind is CutKind.DISK:
            assert plan.cut.step == self.state.persisted_step == self.disk
            assert newest is None or newest < plan.cut.step
        else:
            assert newest is None and self.state.committed_step == 0

    # ------------------------------------------------------------ effects

    def _do_OpenStore(self, effect: ev.OpenStore) -> None:
        self.tell(self.soon(), ev.StoreOpened(effect.generation, "127.0.0.1", 1))

    def _do_StartWorker(self, effect: ev.StartWorker) -> None:
        worker = effect.worker
        self.num_starts += 1
        process = self.processes[worker] = Process()
        process.unkillable = self.sloppy and self.rng.random() < 0.01
        hurts = self.now_s < HURT_S
        if self.plain:
            self._end(worker, 0, self.rng.uniform(1.0, HURT_S))
        elif hurts and self.rng.random() < 0.05:
            self._end(worker, self.rng.choice([0, 1, -9]), self.soon())
        elif not (hurts and self.sloppy and self.state.decorated and self.rng.random() < 0.05):

            def ready() -> None:
                if process.stage == "starting" and not process.doomed:
                    process.stage = "ready"
                    self.decide(ev.WorkerReady(worker, self.disk))

            self.tell(self.rng.choice([0.1, 1.0, 5.0]) + self.soon(), ready)
        else:
            process.stuck = True

    def _do_PublishPlan(self, effect: ev.PublishPlan) -> None:
        pass

    def _do_StartGeneration(self, effect: ev.StartGeneration) -> None:
        self.plan = effect.plan
        self.stalled_s = self.now_s
        for member in effect.plan.members:
            process = self.processes[member.worker]
            if process.stage == "gone":
                continue
            process.stage, process.generation = "joining", effect.plan.generation
            self.tell(self.soon(), lambda w=member.worker: self._join(w))

    def _join(self, worker: Worker) -> None:
        process = self.processes[worker]
        if process.stage != "joining" or process.stuck or process.doomed:
            return
        process.stage = "restoring"
        holds = any(h.step == self.plan.cut.step for h in process.holdings) if self.plan else False
        if not holds and self.rng.random() < 0.5:
            process.holdings = ()  # a receiver in mid-restore
        self.decide(ev.WorkerJoined(worker, process.generation))
        self.tell(self.soon(), lambda: self._restore(worker))

    def _restore(self, worker: Worker) -> None:
        process = self.processes[worker]
        if process.stage != "restoring" or process.stuck or process.doomed:
            return
        assert self.plan is not None
        if any(self.processes[m.worker].stage == "joining" for m in self.plan.members):
            self.tell(0.2, lambda: self._restore(worker))
            return
        process.stage, process.step = "training", self.plan.cut.step
        process.holdings, process.dirty = (Holding(process.step),), False
        self.decide(ev.WorkerRestored(worker, process.generation))

    def _do_AbortGeneration(self, effect: ev.AbortGeneration) -> None:
        for worker in effect.workers:
            delay_s = self.soon()
            if self.sloppy and self.rng.random() < 0.05:
                delay_s = self.rng.choice([4.0, 20.0])
            self.tell(delay_s, lambda w=worker, g=effect.generation: self._leave(w, g))

    def _leave(self, worker: Worker, generation: int) -> None:
        process = self.processes[worker]
        inside = process.stage in ("joining", "restoring", "training")
        if inside and process.generation == generation and not process.stuck and not process.doomed:
            self._report(worker)
            self.decide(
                ev.WorkerInterrupted(worker, generation, process.step, process.holdings, self.disk)
            )

    def _report(self, worker: Worker) -> None:
        process = self.processes[worker]
        if process.dirty:
            keeps = self.rng.random() < 0.5
            process.holdings = (Holding(process.step, "undo"),) if keeps else ()
        process.stage, process.dirty = "ready", False

    def _do_DumpStacks(self, effect: ev.DumpStacks) -> None:
        pass

    def _do_TerminateWorker(self, effect: ev.TerminateWorker) -> None:
        process = self.processes[effect.worker]
        if not process.stuck and self.rng.random() < 0.8:
            self._end(effect.worker, -effect.signum, self.soon())

    def _do_KillWorker(self, effect: ev.KillWorker) -> None:
        process = self.processes[effect.worker]
        if not process.unkillable:
            self._end(effect.worker, -9, self.soon())

    def _do_ExcludeSlot(self, effect: ev.ExcludeSlot) -> None:
        pass

    def _do_Persist(self, effect: ev.Persist) -> None:
        process = self.processes[effect.worker]
        assert self.config.persists
        assert process.stage == "gone" or effect.step in {h.step for h in process.holdings}
        if process.stuck or self.rng.random() < 0.1:
            return

        def persisted() -> None:
            if process.stage == "gone" or process.doomed:
                return
            ok = self.rng.random() < 0.8
            if ok:
                self.disk = effect.step
            self.decide(ev.Persisted(effect.worker, effect.step if ok else None, "disk full"))

        self.tell(self.rng.choice([0.5, 5.0, 25.0]), persisted)

    def _do_Look(self, effect: ev.Look) -> None:
        process = self.processes[effect.worker]
        assert self.config.persists and process.stage in ("ready", "finished", "gone")

        def looked() -> None:
            if process.stage != "gone" and not process.doomed and not process.stuck:
                self.decide(ev.Persisted(effect.worker, self.disk))

        self.tell(self.soon(), looked)

    def _do_Close(self, effect: ev.Close) -> None:
        assert self.plan is not None
        stuck = tuple(w for w in effect.workers if self.processes[w].stuck)
        for worker in effect.workers:
            self._end(worker, 0, self.rng.choice([0.1, 50.0]))
        if stuck:
            self.tell(HANG_S, ev.WorkersHung(self.plan.generation, stuck, 0, self.now_s))

    def _do_Stop(self, effect: ev.Stop) -> None:
        for worker in effect.workers:
            if not self.processes[worker].stuck:
                self._end(worker, 1, self.rng.choice([0.1, 50.0]) if self.sloppy else 0.1)

    def _do_Finish(self, effect: ev.Finish) -> None:
        pass

    def _end(self, worker: Worker, status: int, delay_s: float) -> None:
        process = self.processes[worker]

        def exited() -> None:
            if process.stuck and status >= 0:  # it does nothing any more by itself
                return
            if process.stage != "gone":
                process.stage = "gone"
                process.holdings, step = (), process.step
                self.decide(ev.WorkerExited(worker, status, step, self.disk))

        if delay_s < 1.0:
            process.doomed = True
        self.tell(delay_s, exited)

    # ------------------------------------------------------------ training

    def _members(self, *stages: str) -> list[Worker]:
        if self.plan is None:
            return []
        members = [m.worker for m in self.plan.members]
        generation = self.plan.generation
        known = [(w, self.processes[w]) for w in members]
        return [w for w, p in known if p.stage in stages and p.generation == generation]

    def _step(self) -> None:
        """A step is taken by all or by none; some commit it a moment before the others."""
        self.tell(0.5, "step")
        if self.plan is None:
            return
        workers = self._members("training", "finished")
        usual = [p for p in (self.processes[w] for w in workers) if not p.stuck and not p.doomed]
        if len(usual) < self.plan.world_size:
            self._watch()
            return
        self.stalled_s = self.now_s
        if any(self.processes[w].stage == "finished" for w in workers):
            workers = [w for w in workers if self.processes[w].stage == "training"]
        self.rng.shuffle(workers)
        for worker in workers:
            process = self.processes[worker]
            process.dirty = self.rng.random() < 0.5
            late_s = self.rng.choice([0.0, 0.2])
            self.tell(late_s, lambda w=worker, g=self.plan.generation: self._commit(w, g))

    def _commit(self, worker: Worker, generation: int) -> None:
        process = self.processes[worker]
        if process.stage != "training" or process.generation != generation:
            return
        if process.stuck or process.doomed:
            return
        assert self.plan is not None
        process.step += 1
        process.dirty = False
        process.holdings = (Holding(process.step),)
        if process.step == self.plan.cut.step + 1:
            self.decide(ev.WorkerStepped(worker, generation, process.step))
        over = self.now_s > HURT_S + 60 or process.step % LAST_STEP >= self.length
        if over and process.stage == "training" and process.generation == generation:
            process.stage = "finished"
            self.decide(
                ev.WorkerFinished(worker, generation, process.step, process.holdings, self.disk)
            )
        if self.config.persists and process.step % 20 == 0:
            self.disk = max(self.disk or 0, process.step)

    def _watch(self) -> None:
        """What hang detection would say."""
        inside = self._members("joining", "restoring", "training")
        if not inside or self.stalled_s is None or self.plan is None:
            return
        if self.now_s > self.stalled_s + HANG_S:
            began_s, self.stalled_s = self.stalled_s, self.now_s
            step = min(self.processes[w].step for w in inside)
            self.decide(ev.WorkersHung(self.plan.generation, tuple(sorted(inside)), step, began_s))

    # ------------------------------------------------------------ trouble

    def _trouble(self) -> None:
        if self.now_s >= HURT_S:
            return
        self.tell(self.rng.expovariate(1 / self.gap_s), "trouble")
        if self.plain:
            self._trouble_plain()
            return
        kind = self.rng.choice(self.kinds)
        inside = self._members("joining", "restoring", "training", "ready", "finished")
        inside = [w for w in inside if not self.processes[w].doomed]
        training = [w for w in self._members("training") if not self.processes[w].doomed]
        if kind in ("kill", "two") and inside:
            for worker in self.rng.sample(inside, min(len(inside), 1 + (kind == "two"))):
                self._end(worker, self.rng.choice([-9, -11, 1, 0]), 0.001)
                self._break_peers(worker)
        elif kind == "raise" and training:
            worker = self.rng.choice(training)
            if not self.processes[worker].stuck:
                self._fail(worker, ErrorInfo("builtins.ValueError", "train.py:7"), False)
        elif kind == "collective" and training:
            self._break_peers(None)
        elif kind == "stick" and inside and self.state.outcome is None:
            self.processes[self.rng.choice(inside)].stuck = True
        elif kind == "spare":
            extra = [w for w, p in self.processes.items() if p.stage in ("starting", "ready")]
            if extra:
                self._end(self.rng.choice(sorted(extra)), 1, 0.001)
        elif kind == "health" and self.rng.random() < 0.1:
            slot = Slot(NODE, self.rng.randrange(self.num_slots))
            self.decide(ev.HealthCheckFailed(slot, "bad"))

    def _trouble_plain(self) -> None:
        running = [w for w, p in self.processes.items() if p.stage == "starting" and not p.doomed]
        if not running or self.state.plan is None:
            return
        worker = self.rng.choice(sorted(running))
        if "stick" in self.kinds and self.rng.random() < 0.5:
            self.processes[worker].stuck = True
            hung = ev.WorkersHung(self.state.plan.generation, (worker,), 0, self.now_s)
            self.tell(HANG_S, hung)
        else:
            self._end(worker, self.rng.choice([-9, 1, 3]), 0.001)

    def _break_peers(self, dead: Worker | None) -> None:
        """Peers of a dead rank get errors of their own, often before its death is known."""
        for worker in self._members("training"):
            process = self.processes[worker]
            if worker != dead and not process.doomed and self.rng.random() < 0.5:
                own = ErrorInfo("builtins.RuntimeError", "train.py:9")
                self.tell(0.0, lambda w=worker, e=own: self._fail(w, e, self.rng.random() < 0.9))

    def _fail(self, worker: Worker, error: ErrorInfo, in_collective: bool) -> None:
        process = self.processes[worker]
        if process.stage != "training" or process.doomed or process.stuck:
            return
        self._report(worker)
        self.decide(
            ev.WorkerFailed(
                worker,
                process.generation,
                process.step,
                dataclasses.replace(error),
                in_collective,
                process.holdings,
                self.disk,
            )
        )


def run(seed: int) -> list[str]:
    """The trace of a seed. Raises AssertionError, naming the seed, when a promise breaks."""
    walk = Walk(seed)
    try:
        return walk.run()
    except Exception as error:
        tail = "\n".join(walk.trace[-15:])
        raise AssertionError(
            f"seed {seed} (python -m tests.core.walk {seed}): {error!r}\n{tail}"
        ) from error


if __name__ == "__main__":
    for line in run(int(sys.argv[1])):
        print(line)
