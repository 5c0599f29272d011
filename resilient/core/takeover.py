"""A new leader's view: what the last plan's archive says, and what the nodes say they run.

Nothing that matters is only in a leader's memory. What cannot be seen from the workers (deaths
counted, errors seen, the usual pace) is published with each plan as its *archive*; what can be seen
is told anew by every node, as its inventory. A leader that takes over while everybody trains finds
everybody training, and nobody notices; one that takes over in the middle of a recovery begins that
recovery again, which is harmless: aborting what has been aborted changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from resilient.core import events as ev
from resilient.core.changes import Published
from resilient.core.model import (
    Config,
    Outcome,
    Phase,
    Slot,
    State,
    Status,
    Worker,
    WorkerReport,
    WorkerState,
)

_LEAVING = (ev.WorkerInterrupted, ev.WorkerFailed, ev.WorkerFinished)
_OUTSIDE = (Status.READY, Status.FINISHED)


class Resumed(NamedTuple):
    """How a new leader begins.

    Attributes:
        state: the coordinator's.
        effects: to be carried out first.
        events: to be fed next, in order: nodes that went and came, and what was reported since the
            last plan.
    """

    state: State
    effects: tuple[ev.Effect, ...]
    events: tuple[ev.Event, ...]


def archive(state: State) -> State:
    """What is published with a plan: the state without what the nodes tell anew."""
    return replace(
        state,
        workers={},
        plan=None,
        stores={},
        faults=(),
        root_cause=None,
        deadline_s=None,
        drain_by_s=None,
    )


def resume(
    config: Config,
    published: Published | None,
    inventories: Sequence[ev.NodeJoined],
    backlog: Sequence[ev.Event],
    ended: tuple[Outcome, str] | None,
    now_s: float,
) -> Resumed:
    """The state of a leader that takes over.

    Args:
        published: the last plan; None: there is none yet.
        inventories: of every node that has a lease, made for this leader.
        backlog: what the nodes reported since that plan, in order.
        ended: the outcome that an older leader has told the workers of: it stands.
    """
    state = State(config)
    if published is not None:
        state = replace(published.archive or state, config=config, plan=published.plan)
    plan = state.plan
    nodes = {joined.node: joined for joined in inventories}
    same = {
        node
        for node, joined in nodes.items()
        if plan is None or state.incarnations.get(node) == joined.incarnation
    }
    leaving = {event.worker for event in backlog if isinstance(event, _LEAVING)}
    workers: dict[Worker, WorkerState] = {}
    reports = {
        report.worker: report for node in sorted(same) for report in nodes[node].workers
    }
    for member in plan.members if plan is not None else ():
        report = reports.pop(member.worker, None)
        workers[member.worker] = _member(state, member.slot, report, member.worker in leaving)
    taken = {member.slot for member in plan.members} if plan is not None else set()
    for worker, report in sorted(reports.items()):
        workers[worker] = _extra(report, taken)
    return Resumed(state, (), tuple(backlog))


def _member(
    state: State, slot: Slot, report: WorkerReport | None, leaving: bool
) -> WorkerState:
    raise NotImplementedError


def _extra(report: WorkerReport, taken: set[Slot]) -> WorkerState:
    raise NotImplementedError


_ = (Phase, _OUTSIDE)
