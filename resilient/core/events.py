"""What happens (events) and what is to be done about it (effects): all of the coordinator's world.

Events carry what was seen, never what to do. Effects are carried out by the agent, in order; an
effect about a worker that is gone meanwhile is a no-op, since its exit is an event of its own.
An event that names an older generation than the current one changes nothing but what it proves
about the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from resilient.core.model import (
    ErrorInfo,
    Fault,
    Holding,
    Outcome,
    Plan,
    Slot,
    State,
    Worker,
    WorkerReport,
)

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class NodeJoined:
    """A node is there, with what runs on it.

    workers: its inventory. Not empty where a leader takes over, or where a node comes back whose
    lease had ended: those have kept their state. A node that is known in this incarnation already
    has nothing new to say with it. persisted_step: newest complete on disk that one of them has
    told of. decorated: one of them has reached the decorator. term: of the leader that it was told
    to.
    """

    node: str
    num_slots: int
    incarnation: int = 0
    workers: tuple[WorkerReport, ...] = ()
    term: int = 0
    persisted_step: int | None = None
    decorated: bool = False


@dataclass(frozen=True)
class NodeLeft:
    """certain: its processes are gone (its agent's connection was reset, or it said good-bye).
    False: its lease has ended; it may be cut off and not know of it."""

    node: str
    note: str = ""
    incarnation: int = 0
    certain: bool = True


@dataclass(frozen=True)
class StoreOpened:
    """The TCPStore asked for by OpenStore listens."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True)
class WorkerReady:
    """Reached the decorator for the first time; persisted_step: newest complete on disk, if any."""

    worker: Worker
    persisted_step: int | None = None


@dataclass(frozen=True)
class WorkerJoined:
    """Has made the generation's process groups."""

    worker: Worker
    generation: int


@dataclass(frozen=True)
class WorkerRestored:
    """Its state is that of the plan's cut: the plan is acknowledged."""

    worker: Worker
    generation: int


@dataclass(frozen=True)
class WorkerStepped:
    """Committed its first step of the generation; step: committed steps now."""

    worker: Worker
    generation: int
    step: int


@dataclass(frozen=True)
class WorkerInterrupted:
    """Left its train function because of the abort, and waits."""

    worker: Worker
    generation: int
    step: int
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


@dataclass(frozen=True)
class WorkerFailed:
    """The train function raised by itself (no abort had been seen); the worker waits.

    in_collective: the innermost frames are those of a collective.
    """

    worker: Worker
    generation: int
    step: int
    error: ErrorInfo
    in_collective: bool
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


@dataclass(frozen=True)
class WorkerFinished:
    """The train function returned; the worker waits inside the decorator."""

    worker: Worker
    generation: int
    step: int
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


@dataclass(frozen=True)
class WorkerExited:
    """The process is gone.

    status: exit code, or minus the signal number. step: committed steps, read from its page.
    """

    worker: Worker
    status: int
    step: int = 0
    persisted_step: int | None = None
    began_s: float | None = None
    note: str = ""
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class WorkersHung:
    """No progress for the hang timeout.

    workers: those that stand still, the one accused first. stopped: those of them that cannot come
    out, since the kernel has them stopped.
    """

    generation: int
    workers: tuple[Worker, ...]
    step: int
    began_s: float
    note: str = ""
    stopped: tuple[Worker, ...] = ()


@dataclass(frozen=True)
class WorkerSlow:
    """Behind its peers, but moving. Noted in the journal."""

    worker: Worker
    generation: int
    note: str = ""


@dataclass(frozen=True)
class PaceMeasured:
    """The usual step time is now about this long."""

    usual_step_s: float


@dataclass(frozen=True)
class HealthCheckFailed:
    """The slot must not be given a rank any more."""

    slot: Slot
    note: str


@dataclass(frozen=True)
class Persisted:
    """Answer to Persist and to Look. step: what is complete on disk; None: nothing, or see note."""

    worker: Worker
    step: int | None
    note: str = ""


@dataclass(frozen=True)
class DrainRequested:
    """SIGTERM, SIGINT or a notice: leave at a step boundary. force: at once (asked twice)."""

    signum: int
    force: bool = False


@dataclass(frozen=True)
class TimePassed:
    pass


MemberEvent = WorkerJoined | WorkerRestored | WorkerStepped | WorkerInterrupted | WorkerFinished


@dataclass(frozen=True)
class Alike:
    """The same event of many ranks of one generation, told as one.

    A world of 80,000 ranks says the same thing 80,000 times in each phase of a recovery; whoever
    collects the reports merges what is equal but for the worker.

    Attributes:
        event: of the first of these ranks.
        ranks: of the generation that the event names, as (first, last) spans, ascending, disjoint.
    """

    event: MemberEvent
    ranks: tuple[tuple[int, int], ...]


Event = (
    NodeJoined
    | NodeLeft
    | StoreOpened
    | WorkerReady
    | WorkerJoined
    | WorkerRestored
    | WorkerStepped
    | WorkerInterrupted
    | WorkerFailed
    | WorkerFinished
    | WorkerExited
    | WorkersHung
    | WorkerSlow
    | PaceMeasured
    | HealthCheckFailed
    | Persisted
    | DrainRequested
    | TimePassed
    | Alike
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class OpenStore:
    """Open a TCPStore of its own for that generation and say StoreOpened."""

    generation: int


@dataclass(frozen=True)
class StartWorker:
    """Launch a process. With a slot, its environment is that of the slot's rank in plan (if it has
    one there); slot None: a spare, without RANK."""

    worker: Worker
    slot: Slot | None
    plan: Plan | None = None
    restart_count: int = 0


@dataclass(frozen=True)
class PublishPlan:
    plan: Plan


@dataclass(frozen=True)
class StartGeneration:
    """Tell every member of the plan on this node to enter it."""

    plan: Plan


@dataclass(frozen=True)
class AbortGeneration:
    """Tell these workers to sever their groups and leave the generation."""

    generation: int
    workers: tuple[Worker, ...]
    reason: str


@dataclass(frozen=True)
class DumpStacks:
    """Have these workers' stacks written to the log directory (before the abort that follows)."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class TerminateWorker:
    """SIGTERM (or the signal given); KillWorker follows when its grace is over."""

    worker: Worker
    signum: int = 15


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL to the worker and everything it started."""

    worker: Worker
    reason: str


@dataclass(frozen=True)
class ExcludeSlot:
    slot: Slot
    reason: str


@dataclass(frozen=True)
class Persist:
    """Have this worker write the step it holds to the checkpoint directory, and say Persisted."""

    worker: Worker
    step: int


@dataclass(frozen=True)
class Look:
    """Have this waiting worker look which step is complete on disk, and say Persisted."""

    worker: Worker


@dataclass(frozen=True)
class Close:
    """Tell these workers that every rank has finished: `main()` returns."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Stop:
    """Tell these workers that the job has failed or is drained: the worker that raised raises its
    own error again out of `main()`, the others exit."""

    workers: tuple[Worker, ...]
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Finish:
    """All processes are gone; the agent ends."""

    outcome: Outcome
    root_cause: Fault | None
    reason: str


Effect = (
    OpenStore
    | StartWorker
    | PublishPlan
    | StartGeneration
    | AbortGeneration
    | DumpStacks
    | TerminateWorker
    | KillWorker
    | ExcludeSlot
    | Persist
    | Look
    | Close
    | Stop
    | Finish
)


class Decision(NamedTuple):
    """What a step of the coordinator gives.

    Attributes:
        state: replaces the old one.
        effects: in order; PublishPlan precedes StartGeneration.
        wake_s: call again with TimePassed by then; None: no need.
        reason: one sentence for people; never parsed.
    """

    state: State
    effects: tuple[Effect, ...] = ()
    wake_s: float | None = None
    reason: str = ""
