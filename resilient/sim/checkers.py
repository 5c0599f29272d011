"""What must never happen, and what must: called by the cluster at each relevant happening.

Every checker judges by the simulation's truth (what processes really hold, when leases really
ended), never by what an agent or the coordinator believes, except where it says so. A violation is
a `CheckFailed` that names the checker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import leader, node
from resilient.core.model import CutKind, ErrorInfo, Phase, Plan, Slot, Worker
from resilient.sim.content import ROOT
from resilient.sim.ends import Ends

if TYPE_CHECKING:
    from resilient.sim.agent import Agent
    from resilient.sim.cluster import Cluster
    from resilient.sim.processes import Process
    from resilient.sim.worlds import World

SETTLED_S = 20.0
"""How long a node has to have been there before nobody may pass over what it holds."""

THAWING_S = 1.0


class CheckFailed(Exception):
    """A promise is broken. checker: which one."""

    def __init__(self, checker: str, text: str, time_s: float) -> None:
        super().__init__(f"{checker}: {text} (at {time_s:.3f} s)")
        self.checker = checker
        self.text = text
        self.time_s = time_s


class Checks:
    """plans: as the store's stream has them, by generation. bases: what each restores."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.plans: dict[int, Plan] = {}
        self.bases: dict[int, int] = {}
        self.ends = Ends(cluster, self)
        self._excluded: frozenset[Slot] = frozenset()
        self._workers: set[Worker] = set()
        self._arrived_s: dict[str, float] = {}
        self.is_ending = False  # a leader has decided how the job ends
        self.disk_at_end: int | None = None
        self.num_tolerated = 0  # steps of machines that had just thawed

    def fail(self, checker: str, text: str) -> NoReturn:
        raise CheckFailed(checker, text, self.cluster.timeline.now_s)

    def ensure(self, holds: bool, checker: str, text: str) -> None:
        if not holds:
            self.fail(checker, text)

    # ------------------------------------------------------------ the stream

    def on_change(self, change: ch.Change) -> None:
        self.ends.on_change(change)
        match change:
            case ch.NodeArrived():
                self._arrived_s[change.node] = self.cluster.timeline.now_s
            case ch.NodeGone():
                self._arrived_s.pop(change.node, None)
            case ch.Published():
                self._on_plan(change)
            case ch.Closed():
                self.ends.on_closed(change)

    def _on_plan(self, record: ch.Published) -> None:
        plan = record.plan
        generation = plan.generation
        last = max(self.plans, default=-1)
        self.ensure(generation not in self.plans, "one plan a generation", f"{generation} again")
        self.ensure(generation > last, "one plan a generation", f"{generation} after {last}")
        self._check_members(plan)
        if record.archive is not None:
            self._excluded = self._excluded | record.archive.excluded
        base = self._check_cut(plan, self.bases.get(last))
        self.plans[generation] = plan
        self.bases[generation] = base

    def _check_members(self, plan: Plan) -> None:
        config, name = self.cluster.settings.config, f"plan {plan.generation}"
        workers = [member.worker for member in plan.members]
        slots = [member.slot for member in plan.members]
        nodes = {slot.node for slot in slots}
        ranks = [member.rank for member in plan.members]
        self.ensure(ranks == list(range(len(ranks))), "ranks", f"{name}: {ranks}")
        distinct = len(set(workers)) == len(set(slots)) == len(workers)
        self.ensure(distinct, "ranks", f"{name}: a worker or a slot twice")
        self.ensure(
            len(workers) >= config.min_world_size, "world size", f"{name}: {len(workers)} ranks"
        )
        self.ensure(
            config.min_nodes <= len(nodes) <= config.max_nodes,
            "number of nodes",
            f"{name}: {len(nodes)} nodes",
        )
        alone = {slots[rank] for rank in plan.cut.holders} if len(plan.cut.holders) == 1 else set()
        barred = sorted((set(slots) & self._excluded) - alone)  # the only holder has to give first
        self.ensure(not barred, "excluded slots", f"{name}: {barred}")
        for worker, slot in zip(workers, slots, strict=True):
            process = self.cluster.processes.get(worker)
            if process is None:
                self.fail("members", f"{name}: {worker} was never started")
            self.ensure(worker.node == slot.node, "members", f"{name}: {worker} in {slot}")
            self.ensure(
                slot.local_rank < process.agent.host.num_slots, "members", f"{name}: {slot}"
            )
            early = process.inside and process.agent.runs
            self.ensure(
                not early,
                "verdict",
                f"{name}: {worker} is still in generation {process.generation}",
            )

    def _check_cut(self, plan: Plan, base: int | None) -> int:
        """The resume step is the newest recoverable one; returns what is to be restored."""
        steps, cut, name = self.cluster.contents.steps, plan.cut, f"plan {plan.generation}"
        surest = newest = -1  # what living members hold; what dead ones held as well
        for member in plan.members:
            process = self.cluster.processes[member.worker]
            held = [steps[content] for content in self.valid_copies(process, base)]
            held += [process.told_persisted] if process.told_persisted is not None else []
            newest = max([newest, *held, self.cluster.newest_on_disk() or -1])
            if process.stage != "gone":
                surest = max([surest, *held])
        self._check_others(plan, base)
        if cut.kind is CutKind.INITIAL:
            self.ensure(surest <= 0, "cut", f"{name} begins anew, step {surest} is there")
            return ROOT
        self.ensure(cut.step >= surest, "cut", f"{name}: step {cut.step}, {surest} is there")
        self.ensure(cut.step <= newest, "cut", f"{name}: step {cut.step}, {newest} is the newest")
        if cut.kind is CutKind.DISK:
            return self.cluster.read_disk(cut.step)
        given = set()
        for rank in cut.holders:
            process = self.cluster.processes[plan.members[rank].worker]
            valid = [c for c in self.valid_copies(process, base) if steps[c] == cut.step]
            self.ensure(
                bool(valid),
                "holders",
                f"{name}: rank {rank}, {process.worker}, holds no {cut.step}",
            )
            given.update(valid)
        self.ensure(len(given) == 1, "holders", f"{name}: they hold different states of {cut.step}")
        return given.pop()

    def _check_others(self, plan: Plan, base: int | None) -> None:
        """No node that has been there for a while is passed over with a newer copy."""
        now_s = self.cluster.timeline.now_s
        members = {member.worker for member in plan.members}
        for worker, process in self.cluster.living():
            since_s = self._arrived_s.get(worker.node)
            if worker in members or since_s is None or now_s < since_s + SETTLED_S:
                continue
            if process.stage not in ("ready", "finished") or process.doomed or process.stuck:
                continue
            if not process.agent.runs or process.agent.host.is_frozen:
                continue
            if now_s < process.progress_s + SETTLED_S:
                continue
            if not self.cluster.network.is_quiet(worker.node):
                continue
            for content in self.valid_copies(process, base):
                step = self.cluster.contents.steps[content]
                self.ensure(
                    step <= plan.cut.step,
                    "no step is lost",
                    f"plan {plan.generation}: step {plan.cut.step}, but {worker} holds {step}",
                )

    def valid_copies(self, process: Process, base: int | None) -> list[int]:
        """Its copies on the lineage that the last plan continued: what that plan restored, what
        came before, and what was committed in its own generation."""
        contents, last = self.cluster.contents, max(self.plans, default=-1)
        return [
            content
            for content, _ in process.copies()
            if base is None
            or contents.is_ancestor(content, base)
            or (contents.generations[content] == last and contents.is_ancestor(base, content))
        ]

    # ------------------------------------------------------------ agents

    def on_node_decision(self, agent: Agent, decision: node.NodeDecision, now_s: float) -> None:
        self.ensure(
            decision.wake_s is None or decision.wake_s > now_s,
            "no spinning",
            f"{agent.name} is to be woken at {decision.wake_s}, it is {now_s}: {decision.reason}",
        )

    def on_enter(self, agent: Agent, plan: Plan) -> None:
        self.ensure(
            self.plans.get(plan.generation) == plan,
            "one plan a generation",
            f"{agent.name} enters a plan {plan.generation} that was not published",
        )
        self._ensure_lease(agent, f"enters generation {plan.generation}")

    def on_persist(self, agent: Agent) -> None:
        self._ensure_lease(agent, "persists")

    def _ensure_lease(self, agent: Agent, what: str) -> None:
        alive = self.cluster.store.is_alive(agent.name, agent.incarnation)
        self.ensure(alive, "lease", f"{agent.name} {what} without a lease")

    def on_start(self, agent: Agent, effect: ev.StartWorker) -> None:
        worker = effect.worker
        self.ensure(worker not in self._workers, "worker names", f"{worker} for the second time")
        self._workers.add(worker)

    def on_kill(self, worker: Worker, reason: str) -> None:
        """The last copy of the state is not killed while it is well: when it is decided."""
        process = self.cluster.processes.get(worker)
        if process is None:
            return
        if self.is_ending or process.stage not in ("ready", "finished") or process.doomed:
            return
        if not self.plans or process.stuck or (process.slot in self.cluster.excluded):
            return
        base = self.bases[max(self.plans)]
        steps = self.cluster.contents.steps
        own = max((steps[c] for c in self.valid_copies(process, base)), default=0)
        others = [
            steps[content]
            for _, other in self.cluster.living()
            if other is not process and not other.doomed and other.agent.runs
            for content in self.valid_copies(other, base)
        ]
        self.ensure(
            own - 1 <= max([*others, self.cluster.newest_on_disk() or 0]),
            "no copy is killed",
            f"{process.worker} was the last to hold step {own}: {reason}",
        )

    def on_leader_decision(
        self,
        agent: Agent,
        event: leader.LeaderEvent,
        decision: leader.LeaderDecision,
        now_s: float,
    ) -> None:
        woken = isinstance(event, leader.TimePassed)
        self.ensure(
            decision.wake_s is None or decision.wake_s > now_s or not woken,
            "no spinning",
            f"leader {agent.name}: wake at {decision.wake_s}, it is {now_s}: {decision.reason}",
        )
        for cause, inner in decision.decisions:
            state = inner.state
            self.ensure(
                inner.wake_s is None or inner.wake_s > now_s,
                "no spinning",
                f"coordinator: wake at {inner.wake_s}, it is {now_s}: {inner.reason}",
            )
            if state.outcome is not None and not self.is_ending:
                self.is_ending = True
                self.disk_at_end = self.cluster.newest_on_disk()
            if state.finished:
                continue
            self.ensure(
                inner.wake_s is not None or state.phase not in (Phase.STOPPING, Phase.COLLECTING),
                "bounds",
                f"{state.phase.value} without a bound after {self.cluster.show(cause)}",
            )
            said = inner.reason.split("; ")
            self.ensure(len(set(said)) == len(said), "reasons", f"said twice: {inner.reason}")

    # ------------------------------------------------------------ generations

    def on_restored(self, world: World, process: Process) -> None:
        assert process.live is not None
        content, base = process.live[0], self.bases[world.generation]
        steps = self.cluster.contents.steps
        self.ensure(
            content == base,
            "replicas are equal",
            f"{process.worker} has restored step {steps[content]} of generation "
            f"{self.cluster.contents.generations[content]}, its generation "
            f"{world.generation} begins with step {steps[base]} of generation "
            f"{self.cluster.contents.generations[base]}",
        )
        self.ensure(
            steps[content] == world.plan.cut.step,
            "replicas are equal",
            f"{process.worker} has restored step {steps[content]}, not {world.plan.cut.step}",
        )

    def on_step(self, world: World) -> None:
        newest = max(self.plans)
        if world.generation < newest and self._has_just_thawed(world):
            self.num_tolerated += 1
            return
        self.ensure(
            world.generation == newest,
            "two worlds",
            f"a step is taken in generation {world.generation}; {newest} is published",
        )
        self.ensure(
            self.cluster.store.closed is None,
            "nothing after the end",
            f"a step is taken in generation {world.generation}; the job is closed",
        )
        self.ends.on_step(world)

    def _has_just_thawed(self, world: World) -> bool:
        """A machine that was frozen for longer than its lease, all of its generation on it, may
        take a step before its agent has had a look at the clock. Nothing outside of the worker
        can prevent that, and nobody continues from it."""
        hosts = {process.agent.host for process in world.ranks.values()}
        now_s = self.cluster.timeline.now_s
        return len(hosts) == 1 and now_s - hosts.pop().thawed_s < THAWING_S

    def raised(self, step: int, error: ErrorInfo) -> None:
        self.ends.raised.append((step, error.frame))

    # ------------------------------------------------------------ the end

    def at_end(self) -> None:
        """Everybody has been told that the job is closed."""
        for worker, process in self.cluster.living():
            self.ensure(
                process.unkillable or process.agent.is_dead,
                "nothing is left running",
                f"{worker} is {process.stage}",
            )

    def too_late(self, what: str) -> NoReturn:
        store = self.cluster.store
        leading = self.cluster.leading()
        job = leading.leader.job if leading is not None and leading.leader is not None else None
        phase = job.phase.value if job is not None else "no coordinator"
        self.fail(
            "liveness",
            f"{what}; leader {store.leader} (term {store.term}), {phase}, "
            f"generation {max(self.plans, default=None)}, nodes {sorted(store.leases)}",
        )
