"""One agent's own decisions: what it still has to tell, whether it leads, whether it may go on.

One pure function, `step(state, event, now_s) -> NodeDecision`; the agent is its shell and the
rendezvous is what it talks to. The one idea: nothing that matters is only in a leader's memory.
What an agent has seen stays in its outbox until a *plan* answers it; being read by a leader is not
enough, since that leader may be gone before it has decided. So a new leader finds, in the
rendezvous, the last plan and every report since.

The lease is the other half. While a node holds one, the others count on it; when it cannot renew,
it must have stopped before anybody else may take its ranks. Its end is therefore counted from when
the renewal was *sent*, and a margin earlier. A node whose generation spans other nodes goes on
until a collective fails (the others hold the same generation: nobody has replaced it yet); one that
is alone in its generation, or sees a fault, fences itself: it leaves the generation and keeps the
state. Without a lease it enters no generation.

One node alone has a lease without an end: nobody could take over from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from resilient.core import events as ev
from resilient.core.model import Plan
from resilient.errors import ConfigError

_ADVICE = (ev.PaceMeasured, ev.WorkerSlow, ev.TimePassed)
"""Told once: a leader that never hears it decides as well without."""

_FAULTS = (ev.WorkerExited, ev.WorkerFailed, ev.WorkersHung)
"""Of these, one is enough for a node without a lease to stop."""


@dataclass(frozen=True)
class NodeConfig:
    """Times in seconds.

    Attributes:
        node: its name.
        num_slots: workers it can run.
        repeat_s: a report that was not taken in is sent again after this long.
        fence_margin_s: how long before the end of its lease a node has stopped.
    """

    node: str
    num_slots: int
    repeat_s: float = 1.0
    fence_margin_s: float = 2.0

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        if self.num_slots < 1:
            raise ConfigError("a node must have at least 1 slot")
        if not (self.repeat_s > 0 and self.fence_margin_s >= 0):
            raise ConfigError("the times of a node must be greater than 0 seconds")


@dataclass(frozen=True)
class Report:
    """One event for the coordinator, in the outbox.

    Attributes:
        number: counts up within an incarnation; a leader takes each number once.
        sent_s: when it was last handed to the rendezvous; None: it has to be.
        stored: the rendezvous has it.
    """

    number: int
    event: ev.Event
    sent_s: float | None = None
    stored: bool = False


@dataclass(frozen=True)
class NodeState:
    """All that an agent remembers between two events.

    Attributes:
        incarnation: of this node, given with the lease; None while not registered.
        lease_ends_s: None: it never does (one node alone), or there is none.
        term: of its own leadership; None: it does not lead.
        plan: newest one seen.
        outbox: what no plan has answered yet, in order.
        fenced: it has left its generation by itself and waits, state kept, for a new lease.
    """

    config: NodeConfig
    incarnation: int | None = None
    lease_ends_s: float | None = None
    lost_lease: bool = False
    term: int | None = None
    plan: Plan | None = None
    outbox: tuple[Report, ...] = ()
    next_number: int = 1
    fenced: bool = False
    closed: bool = False


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Registered:
    """The rendezvous knows this node, as a new incarnation. ends_s None: a lease without end."""

    incarnation: int
    ends_s: float | None


@dataclass(frozen=True)
class Renewed:
    """ends_s: counted from when the renewal was sent, not from its answer."""

    ends_s: float


@dataclass(frozen=True)
class LeaseLost:
    """The rendezvous says that the lease has ended."""


@dataclass(frozen=True)
class Elected:
    term: int


@dataclass(frozen=True)
class Deposed:
    pass


@dataclass(frozen=True)
class Seen:
    """Something that the coordinator has to know, whoever leads."""

    event: ev.Event


@dataclass(frozen=True)
class Stored:
    """The rendezvous has the report."""

    number: int


@dataclass(frozen=True)
class PlanSeen:
    """A plan was published. answered: number of this node's newest report that it answers."""

    plan: Plan
    answered: int = 0


@dataclass(frozen=True)
class JobClosed:
    """The job has ended; nothing is waited for any more."""


@dataclass(frozen=True)
class TimePassed:
    pass


NodeEvent = (
    Registered
    | Renewed
    | LeaseLost
    | Elected
    | Deposed
    | Seen
    | Stored
    | PlanSeen
    | JobClosed
    | TimePassed
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True)
class Register:
    """Get a lease, as a new incarnation, and say Registered."""

    node: str
    num_slots: int


@dataclass(frozen=True)
class Campaign:
    """Stand for election, unless it already does, and say Elected once it is won."""


@dataclass(frozen=True)
class SendReport:
    """Hand it to the rendezvous and say Stored. number 0: advice, not repeated."""

    number: int
    event: ev.Event


@dataclass(frozen=True)
class Forget:
    """Remove this node's reports up to that number from the rendezvous: they are answered."""

    up_to: int


@dataclass(frozen=True)
class Lead:
    """Run the coordinator from here: begin with the last plan and the reports in the rendezvous."""

    term: int


@dataclass(frozen=True)
class StepDown:
    """Stop deciding: somebody else leads, or nobody does."""


@dataclass(frozen=True)
class EnterGeneration:
    """This node has members in the plan: they are to enter it."""

    plan: Plan


@dataclass(frozen=True)
class Fence:
    """Have this node's workers leave the generation, keep their state, and persist nothing."""

    generation: int
    reason: str


NodeEffect = Register | Campaign | SendReport | Forget | Lead | StepDown | EnterGeneration | Fence


class NodeDecision(NamedTuple):
    """What a step of the node gives; as `events.Decision`."""

    state: NodeState
    effects: tuple[NodeEffect, ...] = ()
    wake_s: float | None = None
    reason: str = ""


def initial(config: NodeConfig) -> NodeDecision:
    """The state before anything has happened, and the first effects."""
    config.check()
    return NodeDecision(NodeState(config), (Register(config.node, config.num_slots),))


def step(state: NodeState, event: NodeEvent, now_s: float) -> NodeDecision:
    """What the event changes for this node. now_s: its monotonic clock, as in Registered.ends_s.

    Returns:
        Effects in order; wake_s: next repetition of a report, or the last moment to stop before
        the lease ends.
    """
    if state.closed:
        return NodeDecision(state, reason="the job has ended")
    state, effects, reason = _HANDLERS[type(event)](state, event, now_s)
    if state.closed:
        return NodeDecision(state, tuple(effects), None, reason)
    fence = _fence_if_due(state, event, now_s)
    if fence is not None:
        state, more, reason = fence
        effects = [*effects, *more]
    state, sends = _send_due(state, now_s)
    return NodeDecision(state, (*effects, *sends), _wake_s(state, now_s), reason or "noted")


def may_enter(state: NodeState, now_s: float) -> bool:
    """Whether this node may enter a generation or persist anything now."""
    return state.incarnation is not None and not state.lost_lease and not _is_ending(state, now_s)


_Result = tuple[NodeState, list[NodeEffect], str]


def _registered(state: NodeState, event: Registered, now_s: float) -> _Result:
    state = replace(
        state,
        incarnation=event.incarnation,
        lease_ends_s=event.ends_s,
        lost_lease=False,
        fenced=False,
        # What the last incarnation reported went with its lease: all of it is told anew.
        outbox=tuple(replace(r, sent_s=None, stored=False) for r in state.outbox),
    )
    return state, [Campaign()], f"registered as incarnation {event.incarnation}"


def _renewed(state: NodeState, event: Renewed, now_s: float) -> _Result:
    if state.lost_lease or state.lease_ends_s is None:
        return state, [], ""
    was_ending = _is_ending(state, now_s)
    state = replace(state, lease_ends_s=max(state.lease_ends_s, event.ends_s))
    if not was_ending or _is_ending(state, now_s):
        return state, [], ""
    return replace(state, fenced=False), [Campaign()], "the lease was renewed after all"


def _lease_lost(state: NodeState, event: LeaseLost, now_s: float) -> _Result:
    if state.lost_lease or state.incarnation is None:
        return state, [], ""
    effects: list[NodeEffect] = [StepDown()] if state.term is not None else []
    effects.append(Register(state.config.node, state.config.num_slots))
    return replace(state, lost_lease=True, term=None), effects, "the lease has ended"


def _elected(state: NodeState, event: Elected, now_s: float) -> _Result:
    if not may_enter(state, now_s):
        return state, [], "elected without a lease: not counted"
    return replace(state, term=event.term), [Lead(event.term)], f"leads, term {event.term}"


def _deposed(state: NodeState, event: Deposed, now_s: float) -> _Result:
    if state.term is None:
        return state, [], ""
    return replace(state, term=None), [StepDown(), Campaign()], "leads no more"


def _seen(state: NodeState, event: Seen, now_s: float) -> _Result:
    if isinstance(event.event, _ADVICE):
        return state, [SendReport(0, event.event)], ""
    report = Report(state.next_number, event.event)
    state = replace(state, outbox=(*state.outbox, report), next_number=report.number + 1)
    return state, [], ""


def _stored(state: NodeState, event: Stored, now_s: float) -> _Result:
    outbox = tuple(replace(r, stored=True) if r.number == event.number else r for r in state.outbox)
    return replace(state, outbox=outbox), [], ""


def _plan_seen(state: NodeState, event: PlanSeen, now_s: float) -> _Result:
    effects: list[NodeEffect] = []
    kept = tuple(r for r in state.outbox if r.number > event.answered)
    if len(kept) < len(state.outbox):
        effects.append(Forget(event.answered))
    state = replace(state, outbox=kept)
    if state.plan is not None and event.plan.generation <= state.plan.generation:
        return state, effects, "an older plan"
    state = replace(state, plan=event.plan)
    if not _has_members(state):
        return state, effects, "stands by"
    if not may_enter(state, now_s) or state.fenced:
        return state, effects, "no lease: enters no generation"
    return state, [*effects, EnterGeneration(event.plan)], f"generation {event.plan.generation}"


def _job_closed(state: NodeState, event: JobClosed, now_s: float) -> _Result:
    return replace(state, closed=True, outbox=()), [], "the job has ended"


def _time_passed(state: NodeState, event: TimePassed, now_s: float) -> _Result:
    return state, [], ""


_HANDLERS: dict[type[Any], Callable[[NodeState, Any, float], _Result]] = {
    Registered: _registered,
    Renewed: _renewed,
    LeaseLost: _lease_lost,
    Elected: _elected,
    Deposed: _deposed,
    Seen: _seen,
    Stored: _stored,
    PlanSeen: _plan_seen,
    JobClosed: _job_closed,
    TimePassed: _time_passed,
}


def _is_ending(state: NodeState, now_s: float) -> bool:
    ends_s = state.lease_ends_s
    return ends_s is not None and now_s >= ends_s - state.config.fence_margin_s


def _has_members(state: NodeState) -> bool:
    members = state.plan.members if state.plan is not None else ()
    return any(member.slot.node == state.config.node for member in members)


def _is_alone(state: NodeState) -> bool:
    members = state.plan.members if state.plan is not None else ()
    return all(member.slot.node == state.config.node for member in members)


def _fence_if_due(state: NodeState, event: NodeEvent, now_s: float) -> _Result | None:
    """Fences a node without a lease that is alone in its generation, or sees a fault."""
    if state.fenced or state.incarnation is None:
        return None
    if not state.lost_lease and not _is_ending(state, now_s):
        return None
    effects: list[NodeEffect] = []
    if state.term is not None:  # somebody else may lead from now on
        state = replace(state, term=None)
        effects.append(StepDown())
    fault = isinstance(event, Seen) and isinstance(event.event, _FAULTS)
    if not _has_members(state) or not (_is_alone(state) or fault):
        return (state, effects, "no lease: goes on, leads no more") if effects else None
    assert state.plan is not None
    reason = "a fault while the lease could not be renewed" if fault else "the lease is ending"
    effects.append(Fence(state.plan.generation, reason))
    return replace(state, fenced=True), effects, reason


def _send_due(state: NodeState, now_s: float) -> tuple[NodeState, list[NodeEffect]]:
    """Hands over what was never sent, and again what was not taken in."""
    if state.incarnation is None or state.lost_lease:
        return state, []
    sends: list[NodeEffect] = []
    outbox = []
    for report in state.outbox:
        due = report.sent_s is None or now_s >= report.sent_s + state.config.repeat_s
        if due and not report.stored:
            sends.append(SendReport(report.number, report.event))
            report = replace(report, sent_s=now_s)
        outbox.append(report)
    return replace(state, outbox=tuple(outbox)) if sends else state, sends


def _wake_s(state: NodeState, now_s: float) -> float | None:
    times = []
    if state.incarnation is not None and not state.lost_lease:
        times = [
            report.sent_s + state.config.repeat_s
            for report in state.outbox
            if not report.stored and report.sent_s is not None
        ]
        if state.lease_ends_s is not None and not _is_ending(state, now_s):
            times.append(state.lease_ends_s - state.config.fence_margin_s)
    return min(times, default=None)
