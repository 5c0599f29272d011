"""What the coordinator costs at scale: a month of a large fleet, and single decisions.

First thirty days of 10,000 nodes of 8 ranks, in simulation around the production's coordinator
(resilient/sim/fleet.py): nodes fail once in 1,000 days each, now and then a switch takes hundreds
at once, ranks die and hang; every plan is checked. Then each kind of decision in a world of 100,000
ranks, the slowest of its kind. The limits are for one core, in time of the processor: what else
the machine does is left out. The exit code is 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterable, Iterator

from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.model import Config, Holding, Phase, Plan, State, Worker
from resilient.core.ranks import from_ranks, full, spans
from resilient.sim import fleet

SEED = 1  # a month in which a switch fails, too: with 1 failure in 1,000 most have none
FLEET_S, FLEET_BYTES = 60.0, 2e9
NUM_NODES, NUM_SLOTS, NUM_STANDBY = 12_500, 8, 50
DECISION_S = 0.5
NUM_PORTIONS = 20
NUM_REPEATS = 3


class Stopwatch:
    """`coordinator.step`, timed. slowest: seconds and what it was, by what is in `label`."""

    def __init__(self) -> None:
        self.slowest: dict[str, float] = {}
        self.total_s = 0.0
        self.label = ""

    def step(self, state: State, event: ev.Event, now_s: float) -> ev.Decision:
        start_s = time.process_time()
        decision = coordinator.step(state, event, now_s)
        took_s = time.process_time() - start_s
        self.total_s += took_s
        told = event.event if isinstance(event, ev.Alike) else event
        label = self.label or f"{type(told).__name__} in {state.phase.value}"
        self.slowest[label] = max(took_s, self.slowest.get(label, 0.0))
        return decision


def month(num_nodes: int, days: float) -> bool:
    """Whether a month of the fleet stays within its limits."""
    share = num_nodes / 10_000
    config = Config(min_nodes=int(9_000 * share), max_nodes=int(9_950 * share))
    settings = fleet.Settings(num_nodes, NUM_SLOTS, days, config=config)
    watch = Stopwatch()
    start_s, started_s = time.process_time(), time.perf_counter()
    counts = fleet.run(SEED, settings, watch.step)
    took_s, wall_s = time.process_time() - start_s, time.perf_counter() - started_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    what, slowest_s = max(watch.slowest.items(), key=lambda item: item[1])
    print(f"fleet    {num_nodes} nodes of {NUM_SLOTS} ranks, {days:g} days, seed {SEED}")
    print(
        f"faults   {counts.num_faults}: {counts.num_nodes_lost} nodes "
        f"({counts.num_bursts} burst), {counts.num_rank_faults} ranks"
    )
    print(f"plans    {counts.num_recoveries} recoveries, {counts.num_growths} growths, all checked")
    print(f"goodput  {counts.goodput:.2%} of the time in steps that count")
    since = counts.num_decisions - counts.num_decisions_to_start
    print(f"decided  {counts.num_decisions_to_start} times to start, {since} times since")
    print(f"slowest  {slowest_s * 1e3:.0f} ms ({what}); limit {DECISION_S * 1e3:.0f} ms")
    print(f"took     {took_s:.1f} s, {watch.total_s:.1f} s of it decisions; limit {FLEET_S:g} s")
    print(f"wall     {wall_s:.1f} s")
    print(f"memory   {peak_bytes / 1e6:.0f} MB at most; limit {FLEET_BYTES / 1e6:.0f} MB")
    return took_s < FLEET_S and peak_bytes < FLEET_BYTES and slowest_s < DECISION_S


class Script:
    """A job, told what happens. What it orders is known beforehand and not followed up, except
    that processes come up."""

    def __init__(self, watch: Stopwatch, num_nodes: int) -> None:
        self.watch = watch
        self.names = [f"n{index:05d}" for index in range(num_nodes + NUM_STANDBY)]
        self.state = coordinator.initial(Config(min_nodes=num_nodes // 2, max_nodes=num_nodes))
        self.now_s = 0.0
        self.step = 0
        self.starting: list[Worker] = []

    @property
    def plan(self) -> Plan:
        assert self.state.plan is not None
        return self.state.plan

    def tell(self, label: str, *events: ev.Event) -> None:
        for event in events:
            self.watch.label = label
            decision = self.watch.step(self.state, event, self.now_s)
            self.state = decision.state
            for effect in decision.effects:
                if isinstance(effect, ev.StartWorker):
                    self.starting.append(effect.worker)
                elif isinstance(effect, ev.OpenStore):
                    self.tell("a store opens", ev.StoreOpened(effect.generation, "host", 1))

    def come_up(self, label: str) -> None:
        starting, self.starting = self.starting, []
        self.tell(label, *map(ev.WorkerReady, starting))

    def expect(self, phase: Phase) -> None:
        if self.state.phase is not phase:
            sys.exit(f"in {self.state.phase.value}, where it should be in {phase.value}")

    def train(self) -> None:
        """From a plan that is published to its first step."""
        self.expect(Phase.RESTORING)
        number, first = self.plan.generation, self.plan.members[0].worker
        everybody = ((0, self.plan.world_size - 1),)
        self.tell("all have joined", ev.Alike(ev.WorkerJoined(first, number), everybody))
        self.tell("all are restored", ev.Alike(ev.WorkerRestored(first, number), everybody))
        self.expect(Phase.RUNNING)
        self.come_up("a spare is ready")
        self.now_s += 10
        self.step += 2
        self.tell("a first step", ev.WorkerStepped(first, number, self.step))

    def leave(self, gone: Iterable[int], label: str) -> None:
        """The others of the generation come out of it, in portions."""
        self.expect(Phase.STOPPING)
        plan, here = self.plan, full(self.plan.world_size) & ~from_ranks(gone)
        held = (Holding(self.step, "live", plan.generation),)
        size = -(-plan.world_size // NUM_PORTIONS)
        for first in range(0, plan.world_size, size):
            part = spans(here & full(size) << first)
            worker = plan.members[part[0][0]].worker
            left = ev.WorkerInterrupted(worker, plan.generation, self.step, held)
            last = first + size >= plan.world_size
            self.tell(label if last else "some have left", ev.Alike(left, part))

    def lose(self, nodes: Iterable[str], certain: bool, label: str) -> list[int]:
        ranks = []
        for node in nodes:
            ranks += self.plan.ranks_on(node)
            self.tell(label, ev.NodeLeft(node, incarnation=1, certain=certain))
        return ranks


def live(script: Script) -> None:
    """A life in which each kind of decision comes up."""
    names = script.names
    num_nodes = len(names) - NUM_STANDBY
    script.tell("a node joins", *(ev.NodeJoined(n, NUM_SLOTS, 1) for n in names[: num_nodes - 1]))
    script.tell("the first world", ev.NodeJoined(names[num_nodes - 1], NUM_SLOTS, 1))
    last = script.starting.pop()
    script.come_up("a worker is ready")
    script.tell("the first plan", ev.WorkerReady(last))
    script.train()
    script.tell("a node stands by", *(ev.NodeJoined(n, NUM_SLOTS, 1) for n in names[num_nodes:]))
    script.come_up("a worker that stands by is ready")

    dead = script.plan.members[script.plan.world_size // 2]
    script.tell("a rank dies", ev.WorkerExited(dead.worker, -9, script.step))
    script.leave([dead.rank], "next plan: a spare")
    script.train()

    gone = script.lose(names[77:78], False, "a node is lost")
    script.leave(gone, "next plan: a node that stood by")
    script.train()

    gone = script.lose(names[1000 : 1000 + num_nodes // 20], False, "many nodes are lost")
    script.leave(gone, "next plan: many holes")
    script.train()
    back = names[1000 : 1000 + num_nodes // 20]
    script.tell("a node comes back", *(ev.NodeJoined(n, NUM_SLOTS, 2) for n in back))
    ready = script.starting
    script.starting = []
    script.tell("a worker that stands by is ready", *map(ev.WorkerReady, ready))
    script.now_s += 1000
    script.tell("growing", ev.TimePassed())
    script.leave([], "next plan: many nodes more")
    script.train()

    stuck = script.plan.members[100].worker
    hung = ev.WorkersHung(script.plan.generation, (stuck,), script.step, script.now_s)
    script.tell("a rank hangs", hung)
    script.now_s += 100
    script.tell("last holders get more time", ev.TimePassed())
    script.now_s += 100
    script.tell("everybody is killed", ev.TimePassed())
    for member in script.plan.members[:1000]:
        script.tell("one of the killed has ended", ev.WorkerExited(member.worker, -9, script.step))
    script.now_s += 100
    script.tell("what SIGKILL does not end", ev.TimePassed())


def shown(slowest: dict[str, float]) -> Iterator[str]:
    for label, took_s in slowest.items():
        mark = "" if took_s < DECISION_S else "  MISSED"
        yield f"{label:34s} {took_s * 1e3:8.2f} ms{mark}"


def decisions(num_nodes: int) -> bool:
    """Whether every decision stays within its limit: of each run, the slowest of its kind; of some
    runs, the best."""
    best: dict[str, float] = {}
    for _ in range(NUM_REPEATS):
        watch = Stopwatch()
        live(Script(watch, num_nodes))
        best = {label: min(s, best.get(label, s)) for label, s in watch.slowest.items()}
    print(f"decisions, {num_nodes * NUM_SLOTS} ranks; limit {DECISION_S * 1e3:.0f} ms each")
    for line in shown(best):
        print(line)
    return max(best.values()) < DECISION_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000, help="of the fleet")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--decision-nodes", type=int, default=NUM_NODES, help="for the decisions")
    options = parser.parse_args()
    held = [month(options.nodes, options.days), decisions(options.decision_nodes)]
    if not all(held):
        sys.exit(1)


if __name__ == "__main__":
    main()
