"""A month of a large fleet, in bulk: thousands of nodes around the production coordinator.

The cluster (cluster.py) simulates every process and message of a few nodes. Here the only real
thing is `coordinator.step`; the world around it is arithmetic. What 80,000 ranks do is a set of
ranks as a whole number, training between two faults is one division, and what many ranks say alike
is told as `Alike`, in a few portions, with stragglers. So a happening costs what happens, not how
many look on, and thirty days of 10,000 nodes pass within a minute.

Every plan is checked against what really happened (fleet_books.py). What befalls the fleet is drawn
from the seed alone, before anything runs (`draw`), so it is the same whatever the core decides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NoReturn

from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.model import (
    Config,
    CutKind,
    ErrorInfo,
    Holding,
    Member,
    Phase,
    State,
    Worker,
)
from resilient.core.ranks import Ranks, bit, from_ranks, full, has, iterate, spans
from resilient.sim.checkers import CheckFailed
from resilient.sim.fleet_books import Books, Generation
from resilient.sim.timeline import Timeline

DAY_S = 86_400.0
HOUR_S = 3_600.0
QUIET_S = HOUR_S  # the end of a run is without faults: it has to find the job well
HANG_TIMEOUT_S = 120.0
HANG_SHARE = 0.1  # of the faults of single ranks
BURST_OF_NODES = 0.01, 0.05
STALL_S = 900.0  # from the last thing that changed to training again, at most
REFUSED = ErrorInfo("torch.distributed.DistBackendError", "allreduce")

Decide = Callable[[State, ev.Event, float], ev.Decision]


@dataclass(frozen=True)
class Settings:
    """The fleet, the job and what befalls it.

    Attributes:
        node_days_a_failure: mean time from a node's being up to its failing.
        burst_share: of the failures, those that take 1 to 5 % of the nodes at once: a switch.
        rank_faults_a_failure: single ranks that die or hang, for each node that fails.
        step_s: of one training step.
    """

    num_nodes: int = 10_000
    num_slots: int = 8
    days: float = 30.0
    node_days_a_failure: float = 1_000.0
    burst_share: float = 0.001
    rank_faults_a_failure: float = 1.0
    step_s: float = 5.0
    config: Config = field(default_factory=lambda: Config(min_nodes=9_000, max_nodes=9_950))


@dataclass(frozen=True)
class Strike:
    """One failure.

    Attributes:
        kind: "death" or "hang" of a rank; "node": one, or a burst of many.
        place: where, as a share of the ranks or of the nodes there are.
        num_nodes: that stop at once, neighbours.
        repair_s: until they come back, each within two minutes.
    """

    at_s: float
    kind: str
    place: float
    num_nodes: int = 0
    repair_s: float = 0.0


def draw(seed: int, settings: Settings) -> list[Strike]:
    """What befalls the fleet: a Poisson process, silent in the first and the last hour."""
    rng = Random(f"{seed} strikes")
    node_share = 1 / (1 + settings.rank_faults_a_failure)
    mean_s = settings.node_days_a_failure * DAY_S / settings.num_nodes * node_share
    strikes = []
    at_s = QUIET_S + rng.expovariate(1 / mean_s)
    while at_s < settings.days * DAY_S - QUIET_S:
        place = rng.random()
        if rng.random() >= node_share:
            strikes.append(Strike(at_s, "hang" if rng.random() < HANG_SHARE else "death", place))
        elif rng.random() < settings.burst_share:
            num_nodes = math.ceil(rng.uniform(*BURST_OF_NODES) * settings.num_nodes)
            strikes.append(Strike(at_s, "node", place, num_nodes, rng.uniform(0.5, 4) * HOUR_S))
        else:
            strikes.append(Strike(at_s, "node", place, 1, rng.uniform(1, 12) * HOUR_S))
        at_s += rng.expovariate(1 / mean_s)
    return strikes


@dataclass
class Counts:
    """num_faults: failures of nodes and of single ranks; a burst is one. num_recoveries: plans
    after the first that did not grow the world for its own sake; goodput: share of the time that
    went into steps that count at the end."""

    num_faults: int = 0
    num_bursts: int = 0
    num_nodes_lost: int = 0
    num_rank_faults: int = 0
    num_decisions: int = 0
    num_decisions_to_start: int = 0
    num_recoveries: int = 0
    num_growths: int = 0
    committed_step: int = 0
    world_size: int = 0
    goodput: float = 0.0
    trace_hash: str = ""


class Fleet:
    """One run. nodes: of those that are up, the processes on them."""

    def __init__(self, seed: int, settings: Settings, decide: Decide) -> None:
        self.settings = settings
        self.counts = Counts()
        self._seed = seed
        self._rng = Random(seed)
        self._decide = decide
        self._timeline = Timeline()
        self._state = coordinator.initial(settings.config)
        self._books = Books(settings.config)
        self._generation: Generation | None = None
        self._names = [f"n{index:05d}" for index in range(settings.num_nodes)]
        self._nodes: dict[str, set[Worker]] = {}
        self._incarnations: dict[str, int] = {}
        self._up_since_s: dict[str, float] = {}
        self._gone: set[Worker] = set()  # ended, in truth
        self._number = -1  # the newest worker's
        self._incarnation = 0
        self._wake_s: float | None = None
        self._changed_s = 0.0
        self._trace = hashlib.sha256()
        self._carry_out: dict[type[ev.Effect], Callable[..., None]] = {
            ev.OpenStore: self._open_store,
            ev.PublishPlan: self._publish,
            ev.StartGeneration: self._enter,
            ev.AbortGeneration: self._abort,
            ev.KillWorker: self._kill,
            ev.TerminateWorker: self._kill,
            ev.ExcludeSlot: lambda effect: self._books.excluded.add(effect.slot),
            ev.DumpStacks: lambda effect: None,
            ev.Finish: self._finish,
            ev.Close: self._finish,
            ev.Stop: self._finish,
        }

    @property
    def now_s(self) -> float:
        return self._timeline.now_s

    def run(self) -> Counts:
        """Raises CheckFailed: a plan is wrong, the job has ended, or it does not go on."""
        end_s = self.settings.days * DAY_S
        for name in self._names:
            self._timeline.at(self._rng.uniform(0, 10), partial(self._boot, name))
        self._timeline.at(QUIET_S / 2, self._started)
        for strike in draw(self._seed, self.settings):
            self._timeline.at(strike.at_s, partial(self._strike, strike))
        self._timeline.at(end_s, lambda: None)
        while self.now_s < end_s:
            self._timeline.run_next()
        self._check_end()
        counts = self.counts
        counts.trace_hash = self._trace.hexdigest()
        counts.world_size = len(self._books.members)
        counts.committed_step = self._step()
        counts.goodput = counts.committed_step * self.settings.step_s / end_s
        return counts

    def _started(self) -> None:
        self.counts.num_decisions_to_start = self.counts.num_decisions
        self._check_goes_on()

    # ------------------------------------------------------------ the coordinator

    def _tell(self, event: ev.Event, subject: object = "") -> None:
        decision = self._decide(self._state, event, self.now_s)
        self._state = decision.state
        self.counts.num_decisions += 1
        line = f"{self.now_s:.3f} {type(event).__name__} {subject} {decision.state.phase.value} "
        self._trace.update(f"{line}{len(decision.effects)} {decision.reason}\n".encode())
        starting: dict[str, list[Worker]] = {}
        for effect in decision.effects:
            if type(effect) is ev.StartWorker:
                if effect.worker.number <= self._number:
                    self._fail("names of workers", f"{effect.worker} is not new")
                self._number = effect.worker.number
                starting.setdefault(effect.worker.node, []).append(effect.worker)
            else:
                self._carry_out[type(effect)](effect)
        for node, workers in starting.items():
            self._start(node, workers)
        wake_s = decision.wake_s
        if wake_s is not None and wake_s != self._wake_s:
            self._timeline.at(wake_s, partial(self._wake, wake_s))
        self._wake_s = wake_s

    def _wake(self, wake_s: float) -> None:
        if self._wake_s == wake_s:
            self._wake_s = None  # told again where the same time is asked for again
            self._tell(ev.TimePassed())

    def _tell_alike(self, event: ev.MemberEvent, ranks: Ranks) -> None:
        """event: of the lowest of these ranks."""
        said = spans(ranks)
        one = said[0][0] == said[-1][1]
        name = type(event).__name__
        self._tell(event if one else ev.Alike(event, said), f"{name} {event.generation} {said}")

    def _open_store(self, effect: ev.OpenStore) -> None:
        opened = ev.StoreOpened(effect.generation, "host", 1024 + effect.generation % 60_000)
        self._timeline.after(0.01, partial(self._tell, opened))

    def _finish(self, effect: ev.Finish | ev.Close | ev.Stop) -> None:
        self._fail("the job goes on", f"{effect!r:.400}")

    # ------------------------------------------------------------ nodes and processes

    def _boot(self, name: str) -> None:
        self._incarnation += 1
        self._nodes[name] = set()
        self._incarnations[name] = self._incarnation
        self._up_since_s[name] = self._changed_s = self.now_s
        self._books.away.discard(name)
        joined = ev.NodeJoined(name, self.settings.num_slots, incarnation=self._incarnation)
        self._tell(joined, name)

    def _start(self, node: str, workers: Sequence[Worker]) -> None:
        if node in self._nodes:
            self._nodes[node].update(workers)
            self._timeline.after(self._rng.uniform(5, 30), partial(self._ready, workers))

    def _ready(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker in self._nodes.get(worker.node, ()):
                self._changed_s = self.now_s
                self._tell(ev.WorkerReady(worker), worker)

    def _kill(self, effect: ev.KillWorker | ev.TerminateWorker) -> None:
        self._timeline.after(0.05, partial(self._exit, effect.worker))

    def _exit(self, worker: Worker) -> None:
        """The process ends, and its agent sees that at once."""
        if worker not in self._nodes.get(worker.node, ()):
            return
        step = self._step() if worker in self._books.rank_of else 0
        self._nodes[worker.node].remove(worker)
        self._books.dead.add(worker)
        self._end([worker])
        self._tell(ev.WorkerExited(worker, -9, step), worker)

    def _end(self, workers: Iterable[Worker]) -> None:
        """In truth, whoever knows it."""
        self._changed_s = self.now_s
        workers = list(workers)
        self._gone.update(workers)
        ranks = [self._books.rank_of[w] for w in workers if w in self._books.rank_of]
        if ranks and self._generation is not None:
            self._generation.gone |= from_ranks(ranks)
            self._stop()

    # ------------------------------------------------------------ a generation

    def _publish(self, effect: ev.PublishPlan) -> None:
        plan, last = effect.plan, self._generation
        try:
            holding, state_of = self._books.enter(plan, last)
        except ValueError as error:
            self._fail("plan", f"generation {plan.generation}: {error}")
        gone = from_ranks([self._books.rank_of[w] for w in self._gone if w in self._books.rank_of])
        self._generation = Generation(plan, state_of, holding, gone)
        self._changed_s = self.now_s
        if last is not None:
            grown = plan.world_size > last.plan.world_size and not last.gone
            self.counts.num_growths += grown
            self.counts.num_recoveries += not grown
        line = f"plan {plan.generation} {plan.world_size} {plan.cut.step} {len(plan.cut.holders)}"
        self._trace.update(f"{line}\n".encode())

    def _enter(self, effect: ev.StartGeneration) -> None:
        generation = self._generation
        if generation is None or generation.plan is not effect.plan:
            self._fail("plan", f"generation {effect.plan.generation} starts unpublished")
        self._timeline.after(self._rng.uniform(1, 4), partial(self._join, generation))

    def _join(self, generation: Generation) -> None:
        """Groups are made by all ranks together, or not at all. So is the state restored."""
        if generation.well:
            plan = generation.plan
            for delay_s, ranks in self._portions(full(plan.world_size)):
                told = partial(self._joined, generation, ranks)
                self._timeline.after(delay_s, told)
            self._timeline.after(self._rng.uniform(10, 40), partial(self._restore, generation))

    def _joined(self, generation: Generation, ranks: Ranks) -> None:
        ranks &= ~(generation.gone | generation.left)
        if ranks:
            worker, number = _first(generation, ranks), generation.plan.generation
            self._tell_alike(ev.WorkerJoined(worker, number), ranks)

    def _restore(self, generation: Generation) -> None:
        if generation.well:
            everybody = full(generation.plan.world_size)
            generation.holding, generation.state_of = everybody, generation.plan.generation
            generation.began_s = self.now_s
            for delay_s, ranks in self._portions(everybody):
                self._timeline.after(delay_s, partial(self._restored, generation, ranks))
            delay_s = self.settings.step_s + 0.05
            self._timeline.after(delay_s, partial(self._stepped, generation))

    def _restored(self, generation: Generation, ranks: Ranks) -> None:
        ranks &= ~(generation.gone | generation.left)
        if ranks:
            worker, number = _first(generation, ranks), generation.plan.generation
            self._tell_alike(ev.WorkerRestored(worker, number), ranks)

    def _stepped(self, generation: Generation) -> None:
        if generation.well:
            number, step = generation.plan.generation, self._step()
            self._tell(ev.WorkerStepped(generation.plan.members[0].worker, number, step), step)
            if generation.plan.cut.kind is CutKind.INITIAL:
                self._tell(ev.PaceMeasured(self.settings.step_s))

    def _step(self) -> int:
        generation = self._generation
        return generation.step(self.now_s, self.settings.step_s) if generation else 0

    def _stop(self) -> None:
        """A step takes every rank: without one of them, or with an abort, none completes."""
        generation = self._generation
        if generation is not None and generation.stopped_s is None:
            generation.stopped_s = self.now_s

    def _abort(self, effect: ev.AbortGeneration) -> None:
        generation = self._generation
        if generation is None or generation.plan.generation != effect.generation:
            self._fail("abort", f"generation {effect.generation} is not the current one")
        self._stop()
        rank_of = self._books.rank_of
        untold = rank_of.keys() - effect.workers
        if len(untold) + len(effect.workers) != len(rank_of):
            self._fail("abort", "tells workers without a rank, or twice")
        inside = full(generation.plan.world_size) & ~(generation.gone | generation.left)
        if inside & from_ranks([rank_of[worker] for worker in untold]):
            self._fail("abort", "ranks that are inside are not told")
        leaving = inside & ~generation.stuck
        if leaving and self._rng.random() < 0.01:
            stuck = bit(self._pick(leaving))
            generation.stuck |= stuck
            leaving &= ~stuck
        generation.left |= leaving
        for part, step, holdings in self._held(generation, leaving):
            for delay_s, portion in self._portions(part):
                said = partial(self._interrupted, generation, portion, step, holdings)
                self._timeline.after(delay_s, said)

    def _interrupted(
        self, generation: Generation, ranks: Ranks, step: int, holdings: tuple[Holding, ...]
    ) -> None:
        ranks &= ~generation.gone
        if ranks:
            generation.told += [(ranks, held.step, held.generation) for held in holdings]
            worker, number = _first(generation, ranks), generation.plan.generation
            self._tell_alike(ev.WorkerInterrupted(worker, number, step, holdings), ranks)

    def _held(
        self, generation: Generation, ranks: Ranks
    ) -> Iterator[tuple[Ranks, int, tuple[Holding, ...]]]:
        """What these ranks hold: most the same; some are a step ahead, or in the middle of one."""
        rng, step = self._rng, self._step()
        if generation.began_s is not None:
            ahead = ranks & self._some(0.5) if rng.random() < 0.2 else 0
            dirty = ranks & self._some(0.05) & ~ahead if rng.random() < 0.3 else 0
            number = generation.plan.generation
            yield ahead, step + 1, (Holding(step + 1, "live", number),)
            undo = (Holding(step, "undo", number),)
            yield dirty, step, undo if rng.random() < 0.5 else ()
            ranks &= ~(ahead | dirty)
        yield ranks & generation.holding, step, (Holding(step, "live", generation.state_of),)
        yield ranks & ~generation.holding, step, ()

    # ------------------------------------------------------------ draws

    def _some(self, share: float) -> Ranks:
        """Ranks in a row, this share of them at most."""
        size = len(self._books.members)
        num = self._rng.randint(1, max(1, int(share * size)))
        return full(num) << self._rng.randrange(size)

    def _pick(self, ranks: Ranks) -> int:
        """One of these ranks: the first at or after a random place."""
        ranks = ranks >> (place := self._rng.randrange(ranks.bit_length())) << place
        return (ranks & -ranks).bit_length() - 1

    def _portions(self, ranks: Ranks) -> list[tuple[float, Ranks]]:
        """When who of them is heard: most together, in up to three messages, and stragglers."""
        if not ranks:
            return []
        rng, found = self._rng, []
        for _ in range(rng.choice((0, 0, 1, 2))):
            late = bit(self._pick(ranks))
            if ranks & ~late:
                ranks &= ~late
                found.append((rng.uniform(0.5, 4), late))
        for _ in range(rng.randrange(3)):
            part = ranks & full(rng.randrange(1, ranks.bit_length() + 1))
            if part:
                found.append((rng.uniform(0.05, 0.4), part))
            ranks &= ~part
            if not ranks:
                return found
        return [*found, (rng.uniform(0.05, 0.4), ranks)]

    # ------------------------------------------------------------ faults

    def _strike(self, strike: Strike) -> None:
        self._check_goes_on()
        if strike.kind == "node":
            first = int(strike.place * len(self._names))
            names = (self._names * 2)[first : first + strike.num_nodes]
            # Who is being repaired does not fail.
            self._lose([name for name in names if name in self._nodes], strike.repair_s)
        elif self._generation is not None:
            members = self._generation.plan.members
            self._strike_rank(members[int(strike.place * len(members))], strike.kind)

    def _lose(self, names: Sequence[str], repair_s: float) -> None:
        """These nodes stop at this moment; what is told of it comes when it is seen."""
        rng = self._rng
        if not names:
            return
        self.counts.num_faults += 1
        self.counts.num_bursts += len(names) > 1
        self.counts.num_nodes_lost += len(names)
        certain = rng.random() < 0.3
        for name in names:
            workers = self._nodes.pop(name)
            self._end(workers)
            seen_s = rng.uniform(0.01, 0.1) if certain else rng.uniform(9, 10)  # its lease
            self._timeline.after(seen_s, partial(self._left, name, workers, certain))
            self._timeline.after(repair_s + rng.uniform(0, 120), partial(self._boot, name))
        if not certain and rng.random() < 0.5 and self._generation is not None:
            seen_s = rng.uniform(0.02, 4)
            self._timeline.after(seen_s, partial(self._collateral, self._generation))

    def _left(self, name: str, workers: set[Worker], certain: bool) -> None:
        self._changed_s = self.now_s
        self._books.dead |= workers
        self._books.away.add(name)
        left = ev.NodeLeft(name, incarnation=self._incarnations[name], certain=certain)
        self._tell(left, name)

    def _collateral(self, generation: Generation) -> None:
        """Neighbours of what died see their collective break before the lease ends."""
        ranks, raised = full(generation.plan.world_size), 0
        ranks &= ~(generation.gone | generation.stuck | generation.left)
        if generation is not self._generation or generation.began_s is None or not ranks:
            return
        for _ in range(self._rng.randint(1, 3)):
            raised |= bit(self._pick(ranks))
        generation.left |= raised
        number, step = generation.plan.generation, self._step()
        for rank in iterate(raised):
            held = Holding(step, "live", number)
            worker = generation.plan.members[rank].worker
            generation.told.append((bit(rank), step, number))
            self._tell(ev.WorkerFailed(worker, number, step, REFUSED, True, (held,)), worker)

    def _strike_rank(self, member: Member, kind: str) -> None:
        generation = self._generation
        assert generation is not None
        trains = generation.well and generation.began_s is not None
        outside = has(generation.gone | generation.left | generation.stuck, member.rank)
        if outside or (kind == "hang" and not trains):
            return
        self.counts.num_faults += 1
        self.counts.num_rank_faults += 1
        if kind == "death":
            self._exit(member.worker)
        else:
            generation.stuck |= bit(member.rank)
            self._stop()
            self._changed_s = self.now_s
            self._timeline.after(HANG_TIMEOUT_S, partial(self._hung, generation, member))

    def _hung(self, generation: Generation, member: Member) -> None:
        out = has(generation.gone | generation.left, member.rank)
        if generation is self._generation and not out:
            number, began_s = generation.plan.generation, generation.stopped_s or 0.0
            self._changed_s = self.now_s
            hung = ev.WorkersHung(number, (member.worker,), self._step(), began_s)
            self._tell(hung, member.worker)

    # ------------------------------------------------------------ what must hold

    def _check_goes_on(self) -> None:
        generation = self._generation
        trains = generation is not None and generation.began_s is not None and generation.well
        trains = trains and self._state.phase is Phase.RUNNING
        waits = len(self._nodes) < self.settings.config.min_nodes
        if not trains and not waits and self.now_s - self._changed_s > STALL_S:
            phase = self._state.phase.value
            self._fail("goes on", f"{phase}, and nothing since {self._changed_s:.3f} s")

    def _check_end(self) -> None:
        """Without faults for an hour: it trains, on as many nodes as it may have."""
        self._check_goes_on()
        if self._state.phase is not Phase.RUNNING:
            return  # a node has just come
        steady = [n for n in self._nodes if self.now_s - self._up_since_s[n] > STALL_S]
        config = self.settings.config
        due = min(config.max_nodes, len(steady)) if config.replace else config.min_nodes
        num = len(self._books.num_on)
        if num < due:
            self._fail("grows", f"{num} nodes, where {due} could be")

    def _fail(self, checker: str, text: str) -> NoReturn:
        raise CheckFailed(checker, text, self.now_s)


def _first(generation: Generation, ranks: Ranks) -> Worker:
    return generation.plan.members[(ranks & -ranks).bit_length() - 1].worker


def run(seed: int, settings: Settings | None = None, decide: Decide = coordinator.step) -> Counts:
    """One month (or what the settings say) of a fleet.

    Args:
        decide: instead of the production's coordinator: to measure it, or to see the checks bite.
    Raises:
        CheckFailed: a promise was broken; names it, and when.
    """
    return Fleet(seed, settings or Settings(), decide).run()
