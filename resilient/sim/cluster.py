"""A whole cluster in one thread: hosts, agents, workers, a network, a store, and one clock for all.

Everything that happens is an action on the timeline; every delay comes from one `Random`, so a seed
tells the same story each time. What decides is the production code (agent.py is its shell); what
strikes is in faults.py, carried out by strikes.py; what must hold is in checkers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core.model import ErrorInfo, Phase, Plan, Slot, Worker
from resilient.sim.agent import Agent
from resilient.sim.checkers import Checks
from resilient.sim.content import Contents
from resilient.sim.faults import HURT_S, Fault, Settings
from resilient.sim.network import Network
from resilient.sim.processes import Process
from resilient.sim.show import settings_lines, show
from resilient.sim.store import Store
from resilient.sim.strikes import Strikes
from resilient.sim.timeline import Timeline
from resilient.sim.worlds import World, sources

EXPIRE_EVERY_S = 0.25
STEPS_AFTER_HEAL = 10
SETTLE_S = 20.0
"""From the heal to the setting of the training length, where it is open."""


class Host:
    """A machine: it may freeze, lose its agent and get another one. Its clock has an origin and a
    drift of its own."""

    def __init__(self, cluster: Cluster, index: int, name: str, num_slots: int) -> None:
        self.cluster = cluster
        self.index = index
        self.name = name
        self.num_slots = num_slots
        self.agent: Agent | None = None
        self.frozen_until_s = -1.0
        self.thawed_s = 0.0
        self._origin_s = cluster.rng.uniform(-1e5, 1e6)
        self._rate = 1.0 + cluster.rng.uniform(-1e-4, 1e-4)

    @property
    def is_up(self) -> bool:
        return self.agent is not None and not self.agent.is_dead

    @property
    def is_frozen(self) -> bool:
        return self.cluster.timeline.now_s < self.frozen_until_s

    @property
    def clock_s(self) -> float:
        return self.to_clock(self.cluster.timeline.now_s)

    def to_clock(self, time_s: float) -> float:
        return self._origin_s + time_s * self._rate

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """A frozen host does it when it thaws, in the order in which it was due."""
        self._at(self.cluster.timeline.now_s + delay_s, action)

    def at_clock(self, clock_s: float, action: Callable[[], None]) -> None:
        self._at((clock_s - self._origin_s) / self._rate, action)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.is_frozen:
                self.cluster.timeline.at(self.frozen_until_s, act)
            else:
                action()

        self.cluster.timeline.at(time_s, act)

    def freeze(self, duration_s: float) -> None:
        now_s = self.cluster.timeline.now_s
        self.frozen_until_s = self.thawed_s = max(self.frozen_until_s, now_s + duration_s)

        def thawed() -> None:
            if not self.is_frozen:
                self.cluster.poke()

        # A moment later: an agent's timers run before the next collective is through.
        self.cluster.timeline.at(self.frozen_until_s + 0.01, thawed)


class Cluster:
    """One run.

    Attributes:
        processes: all there ever were.
        length: committed steps after which the train function returns; None: not known yet.
        bug: (step, rank) at which the train function always raises.
    """

    def __init__(self, seed: int, settings: Settings, faults: tuple[Fault, ...]) -> None:
        self.seed = seed
        self.settings = settings
        self.rng = Random(f"{seed}/life")
        self.timeline = Timeline()
        self.network = Network(self.rng)
        self.contents = Contents()
        self.trace: list[str] = []
        self.processes: dict[Worker, Process] = {}
        self.length = settings.length
        self.bug: tuple[int, int] | None = None
        self.asked_to_drain = False
        self.starts_were_bad = False
        self.excluded: frozenset[Slot] = frozenset()
        self.slowness = 1.0
        self.bad_starts: Counter[tuple[str, int]] = Counter()
        self.num_recoveries = 0
        self._worlds: dict[int, World] = {}
        self._disk: dict[int, int] = {}
        self._sources: tuple[int, dict[int, int]] = (-1, {})
        self.checks = Checks(self)
        self.store = Store(settings.ttl_s, self._on_change)
        self.hosts = [
            Host(self, index, f"n{index}", slots) for index, slots in enumerate(settings.slots)
        ]
        self.strikes = Strikes(self, faults)
        self.is_healed = False

    # ------------------------------------------------------------ a run

    def run(self, bound_s: float) -> None:
        """To the end of the job. Raises CheckFailed; bound_s: from the heal to the end."""
        for line in settings_lines(self.settings):
            self.note("cluster", line)
        for host in self.hosts:
            self.timeline.after(self.rng.uniform(0.0, 3.0), lambda host=host: self.boot(host))  # type: ignore[misc]
        self.timeline.after(EXPIRE_EVERY_S, self._expire)
        self.strikes.begin()
        self.timeline.at(HURT_S, self._heal)
        while not self.is_over():
            if not self.timeline.run_next():
                self.checks.too_late("nothing will ever happen again")
            if self.timeline.now_s > HURT_S + bound_s:
                self.checks.too_late(f"not over {bound_s:.0f} s after the heal")
        self.checks.at_end()

    def is_over(self) -> bool:
        if self.store.closed is None:
            return False
        return all(not host.is_up or _has_ended(host.agent) for host in self.hosts)

    def boot(self, host: Host) -> None:
        if host.is_up or self.hosts[host.index] is not host:
            return
        self.note(host.name, "boots")
        host.agent = Agent(self, host)
        host.agent.boot()

    def _heal(self) -> None:
        self.is_healed = True
        self.note("cluster", "heals")
        self.strikes.heal()
        self._end_stuck_scripts()
        self.poke()

    def _end_stuck_scripts(self) -> None:
        """Before one of them reaches the decorator, processes that stand still are a script that
        takes its time: only its user can know better, and ends them."""
        if not self.checks.plans:
            for _, process in self.living():
                if process.stage == "starting" and process.stuck:
                    process.exit_later(-15, 0.001)

    def _expire(self) -> None:
        if not self.network.store_down:
            self.store.expire(self.timeline.now_s)
        self.timeline.after(EXPIRE_EVERY_S, self._expire)

    def poke(self) -> None:
        """A link, a host or the store is there again: what waited for it goes on."""
        for host in self.hosts:
            if host.agent is not None and host.agent.runs:
                for watch in host.agent.watches():
                    watch.behind()
        for generation in sorted(self._worlds):
            if self._worlds[generation].is_over():
                del self._worlds[generation]
        for world in list(self._worlds.values()):
            world.poke()

    # ------------------------------------------------------------ looking things up

    def host_of(self, name: str) -> Host | None:
        return next((host for host in self.hosts if host.name == name), None)

    def leading(self) -> Agent | None:
        """The agent that leads, as the store has it."""
        host = self.host_of(self.store.leader) if self.store.leader is not None else None
        return host.agent if host is not None else None

    def living(self) -> list[tuple[Worker, Process]]:
        return [(w, p) for w, p in sorted(self.processes.items()) if p.stage != "gone"]

    def world(self, plan: Plan) -> World:
        if plan.generation not in self._worlds:
            self._worlds[plan.generation] = World(self, plan)
        return self._worlds[plan.generation]

    def sources(self, plan: Plan) -> dict[int, int]:
        if self._sources[0] != plan.generation:
            self._sources = (plan.generation, sources(plan))
        return self._sources[1]

    # ------------------------------------------------------------ the disk

    def newest_on_disk(self) -> int | None:
        return max(self._disk, default=None)

    def write_disk(self, step: int, content: int) -> None:
        self._disk[step] = content

    def read_disk(self, step: int) -> int:
        content = self._disk.get(step)
        if content is None:
            self.checks.fail("disk", f"there is no step {step} on disk")
        return content

    # ------------------------------------------------------------ what happens

    def note(self, who: str, what: str) -> None:
        self.trace.append(f"{self.timeline.now_s:.3f} {who} {what}")

    def show(self, value: object) -> str:
        return show(value)

    def _on_change(self, change: ch.Change) -> None:
        if not isinstance(change, ch.Reported):
            self.note("store", show(change))
        for host in self.hosts:
            if host.agent is not None and host.agent.runs:
                for watch in host.agent.watches():
                    watch.behind()
        self.checks.on_change(change)

    def starts(self, process: Process) -> None:
        """How a new process fares."""
        rng, node = self.rng, process.worker.node
        delay_s = rng.choice([0.05, 0.5, 2.0]) + rng.uniform(0.0, 0.5)
        if self.bad_starts["stuckstart", self._index(node)] and rng.random() < 0.5:
            process.stuck = True
        elif self.bad_starts["badstart", self._index(node)] and rng.random() < 0.7:
            process.exit_later(rng.choice([1, -9]), delay_s)
        elif self.bad_starts["slowstart", self._index(node)]:
            process.start(rng.uniform(10.0, 60.0))
        else:
            process.start(delay_s)

    def _index(self, node: str) -> int:
        host = self.host_of(node)
        return host.index if host is not None else -1

    def bug_at(self, process: Process, rank: int, world_size: int) -> ErrorInfo | None:
        if self.bug is None or process.step != self.bug[0] or rank != self.bug[1] % world_size:
            return None
        return ErrorInfo("builtins.ZeroDivisionError", "train.py:13 in main")

    def stepped(self, world: World) -> None:
        """All ranks take a step together."""
        step = next(iter(world.ranks.values())).step
        if world.num_steps == 1:
            self.note("world", f"generation {world.generation} takes step {step}")
        settled = self.is_healed and self.timeline.now_s > HURT_S + SETTLE_S
        if self.length is None and settled:
            self.length = step + STEPS_AFTER_HEAL
            self.note("cluster", f"the training length is {self.length}")

    def decided(self, agent: Agent, event: ev.Event, decision: ev.Decision) -> None:
        if not decision.state.excluded <= self.excluded:
            self.excluded = self.excluded | decision.state.excluded
            self.checks.ends.count_nodes()
        if decision.reason == "noted" and not decision.effects:
            return
        effects = ", ".join(type(effect).__name__ for effect in decision.effects)
        phase = decision.state.phase.value
        self.note(
            f"leader {agent.name}", f"{show(event)} -> {phase}: {decision.reason} [{effects}]"
        )

    def in_phase(self, agent: Agent, phase: Phase) -> None:
        if phase is Phase.STOPPING:
            self.num_recoveries += 1
        self.strikes.trigger(phase.value)

    def on_takeover(self, agent: Agent) -> None:
        self.strikes.trigger("takeover")

    def on_publishing(self, agent: Agent) -> None:
        self.strikes.trigger("publishing")


def _has_ended(agent: Agent | None) -> bool:
    return agent is not None and agent.has_ended
