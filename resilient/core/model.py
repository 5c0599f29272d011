"""What the decisions are about: slots, workers, plans, faults, and the coordinator's state.

Everything here is frozen: a decision replaces the state, it never changes it in place. Nothing here
knows a clock, a socket or torch. Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

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
        for member in self.members:
            if member.worker == worker:
                return member.rank
        return None


@dataclass(frozen=True)
class Holding:
    """One copy of the state that a worker can give. Which generation it was made in is that of the
    report it is in.

    Attributes:
        step: committed steps in it.
        source: "live" (parameters as they are now) or "undo" (copy taken before a step).
    """

    step: int
    source: str = "live"


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


@dataclass(frozen=True)
class State:
    """All the coordinator remembers between two events.

    Attributes:
        workers: the living ones.
        next_number: for the next worker's name.
        plan: of the current generation; in FORMING the intended one of generation 0.
        stores: TCPStores opened for generations to come, by generation.
        decorated: some worker has reached `@resilient.train`.
        committed_step: newest step any worker is known to have committed.
        persisted_step: newest step known to be complete on disk.
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
    workers: Mapping[Worker, WorkerState] = field(default_factory=dict)
    next_number: int = 0
    plan: Plan | None = None
    stores: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    excluded: frozenset[Slot] = frozenset()
    decorated: bool = False
    committed_step: int = 0
    persisted_step: int | None = None
    usual_step_s: float | None = None
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
