"""What the decisions are about: slots, workers, plans, faults, and the coordinator's state.

Everything here is frozen: a decision replaces the state, it never changes it in place. Nothing here
knows a clock, a socket or torch. Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import compress, count
from typing import NamedTuple, TypeAlias

from resilient.core.ranks import Ranks, has, show
from resilient.errors import ConfigError


class Slot(NamedTuple):
    """A place that can run a worker: a node, and a local rank on it."""

    node: str
    local_rank: int


class Worker(NamedTuple):
    """One process, by the node it lives on and a number that is never used again in the job."""

    node: str
    number: int


class Phase(Enum):
    """Where the job is. The names are those of the journal and the report."""

    FORMING = "forming"  # workers start; an unmodified script stays here until it ends
    RUNNING = "running"  # every rank is inside its train function, restored
    STOPPING = "stopping"  # aborted; waiting until every rank has reported or is dead
    COLLECTING = "collecting"  # choosing who is in the next generation, waiting for replacements
    RESTORING = "restoring"  # plan published; ranks make their groups and restore the state
    CLOSED = "closed"  # the outcome is decided; waiting until every process is gone


class Status(Enum):
    """What one living worker is doing."""

    STARTING = "starting"  # process launched, not yet at the decorator (or a script without one)
    READY = "ready"  # waits at the decorator: never ran, or has left its generation
    ENTERED = "entered"  # told to start a generation, groups not made yet
    JOINED = "joined"  # has the generation's groups, restores
    RESTORED = "restored"  # trains
    FINISHED = "finished"  # its function returned; waits, may be entered again


INSIDE = (Status.ENTERED, Status.JOINED, Status.RESTORED)
"""In a generation, and due to report when it ends."""


class FaultKind(Enum):
    DIED = "died"  # the process ended by itself: exit code or signal
    RAISED = "raised"  # the train function raised
    COLLECTIVE = "collective"  # a collective failed under the train function
    HUNG = "hung"  # no progress for the hang timeout
    NODE_LOST = "node lost"


@dataclass(frozen=True)
class ErrorInfo:
    """One exception, for comparing and for people.

    Attributes:
        type_name: the class, with its module.
        frame: innermost frame of the user's own code, "file:line in function".
        text: the formatted traceback; never parsed.
    """

    type_name: str
    frame: str
    text: str = ""


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong, as it was seen.

    Attributes:
        seen_s: when it was seen.
        began_s: when it began, if that is known (a hang: the last progress; a drill: its own mark).
        status: exit code, or minus the signal number; None unless the process ended.
        note: evidence for people (process state, last lines, "out of memory", ...).
    """

    kind: FaultKind
    worker: Worker
    rank: int | None
    generation: int
    step: int
    seen_s: float
    began_s: float | None = None
    status: int | None = None
    error: ErrorInfo | None = None
    note: str = ""


class CutKind(Enum):
    INITIAL = "initial"  # nothing was ever committed: begin at step 0
    MEMORY = "memory"  # living ranks hold it
    DISK = "disk"  # the newest complete checkpoint on disk


@dataclass(frozen=True)
class Cut:
    """The step a generation resumes from, and who holds that step.

    Attributes:
        step: number of committed steps.
        holders: ranks *of the new generation* that hold the step in memory, ascending; empty unless
            kind is MEMORY. Every other rank receives: receiver i (ascending) from
            holders[i % len(holders)].
    """

    kind: CutKind
    step: int
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Member:
    """One rank of a plan."""

    rank: int
    slot: Slot
    worker: Worker


@dataclass(frozen=True)
class Plan:
    """What a generation is.

    Attributes:
        members: one a rank, in rank order; ranks are exactly 0..world_size-1.
        store: (host, port) of the generation's own TCPStore.
        cut: where it resumes.
        first_world_size: of the first plan that was started; parts keep the size it gave them.
    """

    generation: int
    members: tuple[Member, ...]
    store: tuple[str, int]
    cut: Cut
    first_world_size: int = 0

    @property
    def world_size(self) -> int:
        return len(self.members)

    def rank_of(self, worker: Worker) -> int | None:
        """The worker's rank in this plan, or None."""
        for rank in self.ranks_on(worker.node):
            if self.members[rank].worker == worker:
                return rank
        return None

    def rank_at(self, slot: Slot) -> int | None:
        """The rank that has this slot, or None."""
        for rank in self.ranks_on(slot.node):
            if self.members[rank].slot == slot:
                return rank
        return None

    @property
    def nodes(self) -> Set[str]:
        """Those that have a rank."""
        return self._by_node.keys()

    @property
    def num_nodes(self) -> int:
        return len(self._by_node)

    def has_slot(self, slot: Slot) -> bool:
        return self.rank_at(slot) is not None

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """The ranks on that node, ascending."""
        return self._by_node.get(node, ())

    @cached_property
    def _by_node(self) -> Mapping[str, tuple[int, ...]]:
        """By node and not by worker: it outlives the workers, and few plans move a slot."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.slot.node, []).append(member.rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def changes_since(self, older: Plan) -> tuple[int, ...]:
        """Ranks of this plan whose slot or worker is another than in the older plan, or new.

        Cheap where the plans share their `Member`s, as the coordinator's do.
        """
        differ = map(operator.is_not, self.members, older.members)
        changed = [
            rank for rank in compress(count(), differ) if self.members[rank] != older.members[rank]
        ]
        return (*changed, *range(older.world_size, self.world_size))

    def share_index(self, older: Plan, changed: tuple[int, ...]) -> None:
        """Takes over what the older plan knows of its nodes; changed: as `changes_since` says."""
        both = min(self.world_size, older.world_size)
        moved = [r for r in changed if r >= both or self.members[r].slot != older.members[r].slot]
        gone = range(both, older.world_size)
        index = older._by_node
        if moved or gone:
            found = dict(index)
            for rank in (*(r for r in moved if r < both), *gone):
                node = older.members[rank].slot.node
                found[node] = tuple(other for other in found[node] if other != rank)
            for rank in moved:
                node = self.members[rank].slot.node
                found[node] = tuple(sorted((*found.get(node, ()), rank)))
            index = {node: ranks for node, ranks in found.items() if ranks}
        self.__dict__["_by_node"] = index  # where cached_property looks for it


@dataclass(frozen=True)
class Holding:
    """One copy of the state that a worker can give.

    Attributes:
        step: committed steps in it.
        source: "live" (parameters as they are now) or "undo" (copy taken before a step).
        generation: the one whose restore or commit made it what it is; -1: that of the report it
            is in. A copy of a branch that a later generation did not continue is of no use.
    """

    step: int
    source: str = "live"
    generation: int = -1

    def of(self, generation: int) -> Holding:
        """The same, with the report's generation where it named none."""
        return self if self.generation >= 0 else Holding(self.step, self.source, generation)


@dataclass(frozen=True)
class WorkerReport:
    """One living worker, as its node's inventory has it.

    Attributes:
        status: as far as its agent knows; READY too when it has left its generation.
        slot: None for a spare.
        generation: the one it is in or has last left; -1 before the first.
        step: committed steps, as its node last heard.
        holdings: empty while it is inside a generation.
    """

    worker: Worker
    status: Status
    slot: Slot | None = None
    generation: int = -1
    step: int = 0
    holdings: tuple[Holding, ...] = ()


class Outcome(Enum):
    """How the job ended; launcher and docs map each to an exit code."""

    DONE = "done"
    TRAIN_FUNCTION_FAILED = "train function failed"
    MISCONFIGURED = "misconfigured"  # the train function used us wrongly: ConfigError
    UNRECOVERABLE = "unrecoverable"
    DRAINED = "drained"
    SCRIPT_FAILED = "script failed"  # unmodified script: the root-cause worker's own status
    SIGNALLED = "signalled"  # unmodified script: the agent was told to stop


@dataclass(frozen=True)
class Config:
    """What the user asked for. Times in seconds.

    Attributes:
        min_world_size: fewer ranks than this never train.
        num_spares: spares kept ready on each node, for decorated scripts.
        replace: False shrinks at once instead of replacing a dead rank.
        max_restarts: of the whole group, for unmodified scripts only.
        max_deaths_per_slot: deaths of one slot without a committed step that exclude it.
        max_barren_generations: generations without a committed step after which the job stops.
        interrupt_timeout_s: floor of the time a rank has to come out after an abort
            (the bound is max(this, 3 usual steps)).
        kill_timeout_s: from SIGKILL to the process being gone, after which its slot is excluded.
        start_timeout_s: from the first worker at the decorator to the last one, at the start of
            the job; after it the late ones are killed and started again.
        rendezvous_timeout_s: waiting for replacements, after which the world shrinks.
        last_holder_timeout_s: what the ranks get on top when no other rank holds the state.
        grace_s: from SIGTERM to SIGKILL, on every path; also the bound of a drain.
        persists: the job has a checkpoint directory.
        min_nodes, max_nodes: as `--nnodes MIN:MAX`. With fewer than min_nodes the job waits, state
            kept; nodes beyond max_nodes stand by.
        last_call_s: from min_nodes being there to the start, for more of them to come.
        quorum_timeout_s: waiting for nodes, at the start and later, after which the job ends.
        grow_delay_s: a node that came is taken in no sooner than this after the generation began.
        orphan_timeout_s: a node without a lease whose generation still completes its collectives
            goes on for this long at most; where nobody of the last generation is left to be
            asked, the next one waits for it.
    """

    min_world_size: int = 1
    num_spares: int = 1
    replace: bool = True
    max_restarts: int = 0
    max_deaths_per_slot: int = 3
    max_barren_generations: int = 3
    interrupt_timeout_s: float = 5.0
    kill_timeout_s: float = 10.0
    start_timeout_s: float = 600.0
    rendezvous_timeout_s: float = 60.0
    last_holder_timeout_s: float = 30.0
    grace_s: float = 30.0
    persists: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_s: float = 30.0
    quorum_timeout_s: float = 600.0
    grow_delay_s: float = 30.0
    orphan_timeout_s: float = 300.0

    def check(self) -> None:
        """Raises ConfigError when a value is out of range or the bounds are not ordered."""
        if self.min_world_size < 1:
            raise ConfigError("--min-world-size must be at least 1")
        if self.num_spares < 0 or self.max_restarts < 0:
            raise ConfigError("--spares and --max-restarts must not be negative")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError("--nnodes must be MIN:MAX with 1 <= MIN <= MAX")
        if min(self.interrupt_timeout_s, self.kill_timeout_s, self.grace_s) <= 0:
            raise ConfigError("timeouts must be greater than 0 seconds")
        if not self.interrupt_timeout_s < self.kill_timeout_s < self.rendezvous_timeout_s:
            raise ConfigError(
                "timeouts must be ordered: interrupt < kill < rendezvous; they are "
                f"{self.interrupt_timeout_s:g} s, {self.kill_timeout_s:g} s and "
                f"{self.rendezvous_timeout_s:g} s"
            )


@dataclass(frozen=True)
class WorkerState:
    """What the coordinator knows of one living worker.

    Attributes:
        slot: None for a spare.
        generation: the generation it is in or has last left; -1 before the first.
        holdings: what it reported when it left its generation; empty while it is inside one.
        killed: it was told to die, with SIGKILL; only its exit is awaited.
    """

    status: Status = Status.STARTING
    slot: Slot | None = None
    generation: int = -1
    holdings: tuple[Holding, ...] = ()
    killed: bool = False


def extra_of(report: WorkerReport, taken: Container[Slot | None] = ()) -> WorkerState:
    """A worker without a rank, as its node tells of it; a spare, if its slot is taken."""
    slot = None if report.slot in taken else report.slot
    status = Status.READY if report.status is Status.FINISHED else report.status
    return WorkerState(status, slot, report.generation, report.holdings)


Group: TypeAlias = tuple[Ranks, tuple[Holding, ...]]
"""Ranks that hold the same."""


@dataclass(frozen=True, repr=False)
class Roster:
    """What the members of the current plan are doing: sets of ranks, not a record for each.

    A rank is in one of the sets named as the values of `Status`; in none of them, its process is
    gone.

    Attributes:
        killed: of the living, those told to die with SIGKILL; only their exit is awaited.
        lost: those whose node has left. They are gone, and so is their slot.
        holdings: what those that left their generation reported, each rank in one group at most;
            who is inside a generation, or holds nothing, is in none.
    """

    starting: Ranks = 0
    ready: Ranks = 0
    entered: Ranks = 0
    joined: Ranks = 0
    restored: Ranks = 0
    finished: Ranks = 0
    killed: Ranks = 0
    lost: Ranks = 0
    holdings: tuple[Group, ...] = ()

    @property
    def alive(self) -> Ranks:
        """Those with a process, whatever it has been told."""
        return (
            self.starting | self.ready | self.entered | self.joined | self.restored | self.finished
        )

    @property
    def inside(self) -> Ranks:
        """In a generation, and due to report when it ends."""
        return self.entered | self.joined | self.restored

    @property
    def waiting(self) -> Ranks:
        """At the decorator, or back there: can enter the next generation."""
        return self.ready | self.finished

    def of(self, status: Status) -> Ranks:
        found: Ranks = getattr(self, status.value)
        return found

    def status_of(self, rank: int) -> Status | None:
        return next((status for status in Status if has(self.of(status), rank)), None)

    def holdings_of(self, rank: int) -> tuple[Holding, ...]:
        return next((held for ranks, held in self.holdings if has(ranks, rank)), ())

    def put(self, ranks: Ranks, status: Status, holdings: tuple[Holding, ...] = ()) -> Roster:
        """These ranks are doing that now, and hold this."""
        rest = self._before(ranks)
        groups = rest.holdings
        if holdings and ranks:
            same = next((held for held, what in groups if what == holdings), 0)
            others = (group for group in groups if group[1] != holdings)
            groups = (*others, (same | ranks, holdings))
        changes = {status.value: rest.of(status) | ranks}
        return replace(rest, holdings=groups, **changes)

    def without(self, ranks: Ranks) -> Roster:
        """The processes of these ranks are gone."""
        return replace(self._before(ranks), killed=self.killed & ~ranks)

    def _before(self, ranks: Ranks) -> Roster:
        """Without what these ranks do and hold."""
        others = ~ranks
        groups = ((held & others, what) for held, what in self.holdings)
        return replace(
            self,
            **{status.value: self.of(status) & others for status in Status},
            holdings=tuple(group for group in groups if group[0]),
        )

    def __repr__(self) -> str:
        sets = {status.value: self.of(status) for status in Status}
        sets |= {"killed": self.killed, "lost": self.lost}
        shown = [f"{name}={show(ranks)}" for name, ranks in sets.items() if ranks]
        shown += [f"{show(ranks)} hold {held}" for ranks, held in self.holdings]
        return f"Roster({'; '.join(shown)})"


@dataclass(frozen=True)
class State:
    """All the coordinator remembers between two events.

    Attributes:
        roster: the members of the plan.
        extras: the living workers without a rank: spares, and replacements on their way.
        incarnations: of the nodes, by name; of those that have left, the last one.
        losses: how often each node was lost, by name.
        next_number: for the next worker's name.
        plan: of the current generation; in FORMING the intended one of generation 0.
        stores: TCPStores opened for generations to come, by generation.
        decorated: some worker has reached `@resilient.train`.
        committed_step: newest step any worker is known to have committed.
        persisted_step: newest step known to be complete on disk.
        cuts: (generation, step) that generations resumed from; what an older generation committed
            beyond a later one's step was abandoned. Those that say nothing any more are left out.
        began_s: when the current generation was published.
        away: nodes whose lease ended while workers lived there: they may come back with the state.
        silent: ranks that were inside when their node's lease ended: they may still train.
        look_due: ranks were lost with their nodes, and nobody has told what they left on disk.
        looked: somebody has, in this recovery.
        unsure: nobody is left who could tell whether the last generation committed a step.
        looking: the worker that was asked to look there.
        orphans_until_s: when they do so no longer, whatever has become of them.
        soon_until_s: how long they are waited for where only an older step is on disk.
        away_until_s: how long nobody else's state is waited for, where there is none here.
        quorum_by_s: while there are too few nodes: when that ends the job.
        last_call_over: at the start, nodes beyond the minimum have had their time to come.
        usual_step_s: measured pace, for bounds that scale with it; None before it is known.
        faults: of the current recovery, in the order they were seen.
        errors_seen: (step, error class, frame) of root causes that were raised, since that step.
        deaths: per slot, since the last committed step.
        num_barren: generations in a row that ended without a committed step.
        extended: the ranks that are the last to hold the state have been given their extra time.
        drain_by_s: when everything has to have ended, once a drain was asked for.
        deadline_s: when the current phase's bound ends; None without one.
        finished: Finish has been given; nothing follows.
    """

    config: Config
    phase: Phase = Phase.FORMING
    nodes: Mapping[str, int] = field(default_factory=dict)  # node -> number of slots
    incarnations: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    next_number: int = 0
    plan: Plan | None = None
    roster: Roster = Roster()
    extras: Mapping[Worker, WorkerState] = field(default_factory=dict)
    stores: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    excluded: frozenset[Slot] = frozenset()
    decorated: bool = False
    committed_step: int = 0
    persisted_step: int | None = None
    cuts: tuple[tuple[int, int], ...] = ()
    usual_step_s: float | None = None
    began_s: float = 0.0
    away: frozenset[str] = frozenset()
    silent: Ranks = field(default=0, repr=False)
    look_due: bool = False
    looked: bool = False
    unsure: bool = False
    looking: Worker | None = None
    orphans_until_s: float | None = None
    away_until_s: float | None = None
    soon_until_s: float | None = None
    quorum_by_s: float | None = None
    last_call_over: bool = False
    stepped: bool = False  # the current generation has committed a step
    faults: tuple[Fault, ...] = ()
    root_cause: Fault | None = None  # of the newest recovery, or of the end
    errors_seen: frozenset[tuple[int, str, str]] = frozenset()
    deaths: Mapping[Slot, int] = field(default_factory=dict)
    num_spare_deaths: int = 0
    num_barren: int = 0
    num_restarts: int = 0
    draining: int | None = None  # the signal that asked for it
    drain_by_s: float | None = None
    persisting: Worker | None = None
    outcome: Outcome | None = None
    outcome_reason: str = ""
    extended: bool = False
    deadline_s: float | None = None
    finished: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether other nodes can come. Without a rendezvous, nodes have no incarnation."""
        return self.config.max_nodes > 1 or any(self.incarnations.values())

    def is_continued(self, holding: Holding) -> bool:
        """Whether the state of that copy is one that the current generation's comes from."""
        return all(
            holding.step <= step
            for generation, step in self.cuts
            if generation > holding.generation
        )

    def member_state(self, rank: int) -> WorkerState | None:
        """What is known of the member with that rank; None: its process is gone."""
        status = self.roster.status_of(rank)
        if status is None or self.plan is None:
            return None
        return WorkerState(
            status,
            self.plan.members[rank].slot,
            self.plan.generation if self.plan.first_world_size else -1,  # 0: not started yet
            self.roster.holdings_of(rank),
            has(self.roster.killed, rank),
        )

    @property
    def workers(self) -> Mapping[Worker, WorkerState]:
        """Every living worker: for describing a small world, not for deciding about a large one."""
        members = self.plan.members if self.plan else ()
        known = ((member.worker, self.member_state(member.rank)) for member in members)
        return {**{w: state for w, state in known if state is not None}, **self.extras}
