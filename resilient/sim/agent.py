"""One simulated agent: the shell around `node.step` and, while it leads, around `leader.step`.

The one idea: nothing here decides. What workers and the store do becomes an event, with the time of
this agent's own clock; what comes back is carried out. The real agent is the same shell around the
same two functions, with sockets in place of a timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import leader, node
from resilient.core.model import Plan, Worker
from resilient.sim import store as st
from resilient.sim.link import Watch, call
from resilient.sim.processes import Process

if TYPE_CHECKING:
    from resilient.sim.cluster import Cluster, Host

RETRY_S = 1.0
CAMPAIGN_AGAIN_S = 5.0


class Agent:
    """Lives as long as its host lets it; another one on the same host is another object."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster = cluster
        self.host = host
        self.name = host.name
        self.processes: dict[Worker, Process] = {}
        self.has_ended = False
        self.is_dead = False
        self.leader: leader.LeaderState | None = None
        self._config = node.NodeConfig(
            host.name,
            host.num_slots,
            fence_margin_s=cluster.settings.fence_margin_s,
            interrupt_timeout_s=cluster.settings.config.interrupt_timeout_s,
            orphan_timeout_s=cluster.settings.config.orphan_timeout_s,
        )
        self.state = node.initial(self._config).state
        self._wake_s: float | None = None  # of the timer that is set, and what it is to be
        self._timer_s: float | None = None
        self._leader_wake_s: float | None = None
        self._leader_timer_s: float | None = None
        self._is_registering = False
        self._renewing: int | None = None
        self._campaign_since: float | None = None
        self._watched_hang = -1
        self._measured = -1
        self._led_term = 0
        self.watch: Watch | None = None
        self.leader_watch: Watch | None = None

    @property
    def runs(self) -> bool:
        return not (self.is_dead or self.has_ended)

    @property
    def incarnation(self) -> int | None:
        return self.state.incarnation

    def boot(self) -> None:
        self.watch = Watch(self, self._on_changes, self._on_compacted)
        self._apply(node.initial(self._config))

    def watches(self) -> list[Watch]:
        return [watch for watch in (self.watch, self.leader_watch) if watch is not None]

    def note(self, what: str) -> None:
        self.cluster.note(self.name, what)

    # ------------------------------------------------------------ the node's decisions

    def feed(self, event: node.NodeEvent) -> None:
        if self.runs:
            self._apply(node.step(self.state, event, self.host.clock_s))

    def see(self, event: ev.Event) -> None:
        """One of its own workers has done something, or the machine."""
        if self.runs:
            self.note(self.cluster.show(event))
            self.feed(node.Seen(event))

    def measure_pace(self, generation: int) -> None:
        """Its first rank has committed a step of the generation."""
        if self._measured != generation:
            self._measured = generation
            self.see(ev.PaceMeasured(self.cluster.settings.step_s))

    def _apply(self, decision: node.NodeDecision) -> None:
        self.state = decision.state
        now_s = self.host.clock_s
        self.cluster.checks.on_node_decision(self, decision, now_s)
        self._wake_s = decision.wake_s
        if decision.wake_s is not None and (
            self._timer_s is None or decision.wake_s < self._timer_s
        ):
            self._timer_s = decision.wake_s
            self.host.at_clock(decision.wake_s, self._on_timer)
        for effect in decision.effects:
            self._carry_out(effect)

    def _on_timer(self) -> None:
        self._timer_s = None
        if not self.runs or self._wake_s is None:
            return
        if self.host.clock_s >= self._wake_s - 1e-9:
            self._wake_s = None
            self.feed(node.TimePassed())
        else:  # it was put off
            self._timer_s = self._wake_s
            self.host.at_clock(self._wake_s, self._on_timer)

    def _carry_out(self, effect: node.NodeEffect) -> None:
        match effect:
            case node.Register():
                self._register()
            case node.Campaign():
                self._campaign()
            case node.SendReports(reports):
                self._report(reports)
            case node.Advise(event):
                incarnation, store = self.incarnation or 0, self.cluster.store
                call(self, lambda: store.advise(self.name, incarnation, event))
            case node.Forget(up_to):
                incarnation, store = self.incarnation or 0, self.cluster.store
                call(self, lambda: store.forget(self.name, incarnation, up_to))
            case node.Lead(term):
                self._lead(term)
            case node.StepDown():
                self._drop_leader()
                self._resign()
            case node.EnterGeneration(plan):
                self._enter(plan)
            case node.Fence(generation, reason):
                self.note(f"fences generation {generation}: {reason}")
                for _, process in sorted(self.processes.items()):
                    process.abort(generation)
                self._watched_hang = -1
            case node.CarryOut(inner):
                self._order(inner)
            case node.End(reason, outcome):
                self.note(f"ends: {outcome.value if outcome else None}: {reason}")
                self._end()

    # ------------------------------------------------------------ workers

    def _enter(self, plan: Plan) -> None:
        self.note(f"enters generation {plan.generation}")
        self.cluster.checks.on_enter(self, plan)
        for member in plan.members:
            process = self.processes.get(member.worker)
            if process is not None and process.stage != "gone":
                process.slot, process.told = member.slot, plan.generation
                process.progress()
                process.enter(plan)
        self._watched_hang = plan.generation
        hang_s = self.cluster.settings.hang_timeout_s
        self.host.later(hang_s, lambda: self._look_for_hangs(plan.generation))

    def _look_for_hangs(self, generation: int) -> None:
        """What the detector would find: only time that this agent has observed counts."""
        if not self.runs or self._watched_hang != generation:
            return
        inside = [
            process for _, process in sorted(self.processes.items()) if process.is_due(generation)
        ]
        if not inside:
            return
        hang_s = self.cluster.settings.hang_timeout_s
        now_s = self.cluster.timeline.now_s
        since = {p.worker: max(p.progress_s, self.host.thawed_s) for p in inside}
        still = [p for p in inside if now_s - since[p.worker] >= hang_s - 1e-6]
        next_s = min(since.values()) + hang_s if not still else now_s + hang_s
        if still:
            still.sort(key=lambda p: (not p.stuck, p.worker))
            began_s = self.host.to_clock(min(since.values()))
            workers = tuple(p.worker for p in still)
            stopped = tuple(p.worker for p in still if p.stopped)
            step = min(p.step for p in still)
            self.see(ev.WorkersHung(generation, workers, step, began_s, stopped=stopped))
        self.host.later(next_s - now_s, lambda: self._look_for_hangs(generation))

    def _order(self, effect: ev.Effect) -> None:
        self.note(f"does {self.cluster.show(effect)}")
        match effect:
            case ev.StartWorker(worker, slot):
                self.cluster.checks.on_start(self, effect)
                process = self.processes[worker] = Process(self, worker, slot)
                self.cluster.processes[worker] = process
                self.cluster.starts(process)
            case ev.KillWorker(worker):
                self._with(worker, lambda process: process.kill())
            case ev.TerminateWorker(worker, signum):
                self._with(worker, lambda process: process.terminate(signum))
            case ev.AbortGeneration(generation, workers):
                self._watched_hang = -1
                for worker in workers:
                    self._with(worker, lambda process: process.abort(generation))
            case ev.Persist(worker, step):
                self.cluster.checks.on_persist(self)
                self._with(worker, lambda process: process.persist(step))
            case ev.Look(worker):
                self._with(worker, lambda process: process.look())
            case ev.Close(workers):
                self._let_go(workers, 0)
            case ev.Stop(workers):
                self._let_go(workers, 1)

    def _with(self, worker: Worker, action: Callable[[Process], None]) -> None:
        process = self.processes.get(worker)
        if process is not None and process.stage != "gone":
            action(process)

    def _let_go(self, workers: Sequence[Worker], status: int) -> None:
        for worker in workers:
            self._with(worker, lambda process: process.close(status))

        def look() -> None:
            left = [p for w, p in sorted(self.processes.items()) if w in workers]
            left = [p for p in left if p.stage != "gone" and not p.doomed]
            if left and self.runs and status == 0:
                began_s = self.host.clock_s - self.cluster.settings.hang_timeout_s
                hung = tuple(p.worker for p in left)
                self.see(ev.WorkersHung(left[0].generation, hung, left[0].step, began_s))

        self.host.later(self.cluster.settings.hang_timeout_s, look)

    def _end(self) -> None:
        self.has_ended = True
        self._drop_leader()
        for _, process in sorted(self.processes.items()):
            if process.stage != "gone" and not process.unkillable:
                process.exit(-9)
        for watch in self.watches():
            watch.is_closed = True

    def die(self, *, silent: bool) -> None:
        """The agent is gone, and all of its workers with it."""
        self.is_dead = True
        for _, process in sorted(self.processes.items()):
            if process.stage == "gone":
                continue
            process.stage = "gone"
            if process.world is not None:
                process.world.lose(process, silent=silent)
        for watch in self.watches():
            watch.is_closed = True

    # ------------------------------------------------------------ the store

    def _register(self) -> None:
        if self._is_registering:
            return
        self._is_registering = True
        self._try_register()

    def _try_register(self) -> None:
        if not self.runs:
            return
        store, ttl_s = self.cluster.store, self.cluster.settings.ttl_s
        sent_s = self.host.clock_s

        def again() -> None:
            self.host.later(RETRY_S, self._try_register)

        def answered(incarnation: int) -> None:
            self._is_registering = False
            self._campaign_since = None
            self.note(f"registered as incarnation {incarnation}")
            self.feed(node.Registered(incarnation, sent_s + ttl_s))
            self._renewing = incarnation
            self.host.later(self.cluster.settings.renew_s, lambda: self._renew(incarnation))

        def refused(error: st.Refused) -> None:
            again()

        num_slots = self._config.num_slots
        now = self.cluster.timeline
        call(
            self, lambda: store.register(self.name, num_slots, now.now_s), answered, refused, again
        )

    def _renew(self, incarnation: int) -> None:
        if not self.runs or self.state.lost_lease or self.incarnation != incarnation:
            return
        cluster = self.cluster
        ends_s = self.host.clock_s + cluster.settings.ttl_s
        self.host.later(cluster.settings.renew_s, lambda: self._renew(incarnation))
        since_s = self._campaign_since
        if since_s is not None and cluster.timeline.now_s >= since_s + CAMPAIGN_AGAIN_S:
            self._campaign()

        def keep() -> None:
            cluster.store.keep_alive(self.name, incarnation, cluster.timeline.now_s)

        if cluster.network.is_quiet(self.name):  # the same without two messages
            try:
                keep()
            except st.LeaseLost:
                self._lease_lost(incarnation)
            else:
                self.feed(node.Renewed(ends_s))
            return

        def answered(answer: None) -> None:
            if self.incarnation == incarnation:
                self.feed(node.Renewed(ends_s))

        call(self, keep, answered, lambda error: self._lease_lost(incarnation))

    def _lease_lost(self, incarnation: int) -> None:
        if self.incarnation == incarnation and not self.state.lost_lease:
            self.note("has lost its lease")
            self.feed(node.LeaseLost())

    def _campaign(self) -> None:
        incarnation = self.incarnation
        if incarnation is None:
            return
        cluster = self.cluster
        self._campaign_since = cluster.timeline.now_s

        def elected(term: int | None) -> None:
            if term is not None and self.incarnation == incarnation:
                self._campaign_since = None
                self.feed(node.Elected(term))

        def tell(term: int) -> None:  # the answer to a call that has waited
            if cluster.network.can_answer(self.name):
                self.host.later(
                    cluster.network.latency_s(self.name),
                    lambda: elected(term) if self.runs else None,
                )

        call(
            self,
            lambda: cluster.store.campaign(self.name, incarnation, tell),
            elected,
            lambda error: self._refusal(error, incarnation),
        )

    def _refusal(self, error: st.Refused, incarnation: int) -> None:
        if isinstance(error, st.LeaseLost):
            self._lease_lost(incarnation)

    def _report(self, reports: tuple[tuple[int, ev.Event], ...]) -> None:
        incarnation, store, last = self.incarnation, self.cluster.store, reports[-1][0]
        assert incarnation is not None

        def answered(answer: None) -> None:
            if self.incarnation == incarnation:
                self.feed(node.Stored(last))

        call(
            self,
            lambda: store.report(self.name, incarnation, reports),
            answered,
            lambda error: self._refusal(error, incarnation),
        )

    def _resign(self) -> None:
        """Best effort; the lease's end does the same."""
        incarnation, term, store = self.incarnation, self._led_term, self.cluster.store
        if incarnation is not None:
            call(self, lambda: store.resign(self.name, incarnation, term))

    def _on_changes(self, changes: Sequence[ch.Change]) -> None:
        for change in changes:
            self.feed(node.Changed(change))

    def _on_compacted(self) -> None:
        """It has missed changes for good: as if its lease had ended. It does not give the lease
        back: until its workers have left their generation, the others have to count on it."""
        self.note("its watch is compacted")
        if self.incarnation is not None:
            self._lease_lost(self.incarnation)
        if self.runs:
            self.watch = Watch(self, self._on_changes, self._on_compacted)

    def leave_job(self) -> None:
        """Its workers end, then it says good-bye."""
        incarnation, store = self.incarnation, self.cluster.store
        if incarnation is not None:
            call(self, lambda: store.leave(self.name, incarnation, certain=True))
        self.die(silent=False)

    # ------------------------------------------------------------ leading

    def _lead(self, term: int) -> None:
        self._drop_leader()
        self.note(f"leads, term {term}")
        self._led_term = term
        self.leader = leader.initial(self.cluster.settings.config, self.name, term)
        self.leader_watch = Watch(self, self._on_leader_changes, self._on_compacted)
        self.cluster.on_takeover(self)

    def _drop_leader(self) -> None:
        if self.leader is not None:
            self.note(f"leads no more, term {self.leader.term}")
        if self.leader_watch is not None:
            self.leader_watch.is_closed = True
        self.leader = self.leader_watch = None
        self._leader_wake_s = None

    def _on_leader_changes(self, changes: Sequence[ch.Change]) -> None:
        self.feed_leader(leader.Batch(tuple(changes)))

    def feed_leader(self, event: leader.LeaderEvent) -> None:
        if not self.runs or self.leader is None:
            return
        now_s = self.host.clock_s
        decision = leader.step(self.leader, event, now_s)
        self.leader = decision.state
        self.cluster.checks.on_leader_decision(self, event, decision, now_s)
        self._leader_wake_s = decision.wake_s
        if decision.wake_s is not None and (
            self._leader_timer_s is None or decision.wake_s < self._leader_timer_s
        ):
            self._leader_timer_s = decision.wake_s
            self.host.at_clock(decision.wake_s, self._on_leader_timer)
        for event_told, inner in decision.decisions:
            self.cluster.decided(self, event_told, inner)
        for effect in decision.effects:
            match effect:
                case leader.Write(record):
                    self._write(record)
                case leader.OpenStore(generation):
                    self.host.later(0.01, lambda g=generation: self._store_opened(g))  # type: ignore[misc]
                case leader.Stopped():
                    self._drop_leader()
        for _, inner in decision.decisions:
            self.cluster.in_phase(self, inner.state.phase)

    def _on_leader_timer(self) -> None:
        self._leader_timer_s = None
        if not self.runs or self._leader_wake_s is None:
            return
        if self.host.clock_s >= self._leader_wake_s - 1e-9:
            self._leader_wake_s = None
            self.feed_leader(leader.TimePassed())
        else:
            self._leader_timer_s = self._leader_wake_s
            self.host.at_clock(self._leader_wake_s, self._on_leader_timer)

    def _store_opened(self, generation: int) -> None:
        self.feed_leader(leader.Local(ev.StoreOpened(generation, self.name, 1)))

    def _write(self, record: st.Record) -> None:
        incarnation, state = self.incarnation, self.leader
        assert incarnation is not None and state is not None
        term, store = state.term, self.cluster.store

        def answer(event: leader.LeaderEvent) -> None:
            if self.leader is not None and self.leader.term == term:
                self.feed_leader(event)

        def refused(error: st.Refused) -> None:
            answer(leader.Refused(str(error)))
            self._refusal(error, incarnation)

        call(
            self,
            lambda: store.write(self.name, incarnation, term, record),
            lambda done: answer(leader.Written()),
            refused,
            lambda: answer(leader.WriteFailed("no answer")),
        )
        if isinstance(record, ch.Published):
            self.cluster.on_publishing(self)
