"""A new leader's view: what the last plan's archive says, and what the nodes say they run.

Nothing that matters is only in a leader's memory. What cannot be seen from the workers (deaths
counted, errors seen, the usual pace) is published with each plan as its *archive*; what can be seen
is told anew by every node, as its inventory. A leader that takes over while everybody trains finds
everybody training, and nobody notices; one that takes over in the middle of a recovery begins that
recovery again, which is harmless: aborting what has been aborted changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from resilient.core import events as ev
from resilient.core.changes import Published
from resilient.core.model import (
    Config,
    Outcome,
    Phase,
    Plan,
    Roster,
    State,
    Status,
    Worker,
    WorkerReport,
    WorkerState,
    extra_of,
)
from resilient.core.move import Move
from resilient.core.ranks import from_ranks
from resilient.core.transitions import SIGKILL_STATUS, close

_LEAVING = (ev.WorkerInterrupted, ev.WorkerFailed, ev.WorkerFinished)


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
    """What is published with a plan: the state without what the nodes tell anew, and without
    times, which are of this leader's own clock."""
    return replace(
        state,
        plan=None,
        roster=Roster(),
        extras={},
        stores={},
        faults=(),
        root_cause=None,
        deadline_s=None,
        drain_by_s=None,
        began_s=0.0,
        away=frozenset(),
        look_due=False,
        unsure=False,
        looked=False,
        looking=None,
        silent=0,
        quorum_by_s=None,
        orphans_until_s=None,
        away_until_s=None,
        soon_until_s=None,
    )


def resume(
    config: Config,
    published: Published | None,
    inventories: Sequence[ev.NodeJoined],
    backlog: Sequence[ev.Event],
    now_s: float,
    *,
    newest_worker: int = -1,
    decorated: bool = False,
    ended: tuple[Outcome, str] | None = None,
) -> Resumed:
    """The state of a leader that takes over.

    Args:
        published: the last plan; None: there is none yet.
        inventories: of every node that has a lease, made for this leader.
        backlog: what the nodes reported since that plan, in order.
        decorated: an older leader has heard that the script is.
        newest_worker: the highest number of a worker that was started since.
        ended: the outcome that an older leader has told the workers of: it stands.
    """
    state = State(config, decorated=decorated)
    plan = None
    if published is not None:
        plan = published.plan
        state = replace(published.archive or state, config=config, plan=plan, began_s=now_s)
    here = {joined.node: joined for joined in inventories}
    same = {n for n, joined in here.items() if state.incarnations.get(n) == joined.incarnation}
    reports = {report.worker: report for node in same for report in here[node].workers}
    numbers = [report.worker.number for joined in inventories for report in joined.workers]
    numbers += [state.next_number - 1, newest_worker]
    state = replace(state, next_number=max(numbers) + 1)
    if plan is not None:
        left = (event for event in backlog if isinstance(event, _LEAVING))
        leaving = {event.worker for event in left if event.generation == plan.generation}
        roster = _roster(plan, reports, leaving) if ended is None else _waiting(plan, reports)
        forming = bool(roster.entered | roster.joined)
        state = replace(
            state,
            phase=Phase.RESTORING if forming else Phase.RUNNING,
            roster=roster,
            stepped=any(_has_stepped(plan, report) for report in reports.values()),
        )
        extras = _extras(plan, reports)
        move = Move(state, now_s)
        for worker, known in extras.items():
            extras[worker] = replace(known, holdings=move.usable(known.holdings, known.generation))
        state = replace(state, extras=extras)
        if not any(member.slot.node in same for member in plan.members):
            # Nobody is left who could say whether they made a step.
            state = replace(state, stepped=True, unsure=True)
    came = [here[node] for node in sorted(here) if node not in same]
    gone = [
        ev.NodeLeft(node, "gone before this leader came", state.incarnations.get(node, 0), False)
        for node in sorted(state.nodes)
        if node not in here
    ]
    told = {event.worker for event in backlog if isinstance(event, ev.WorkerExited)}
    lost = [
        ev.WorkerExited(member.worker, SIGKILL_STATUS, note="gone before this leader came")
        for member in (plan.members if plan is not None else ())
        if member.slot.node in same and member.worker not in reports | dict.fromkeys(told)
    ]
    move = Move(state, now_s)
    for joined in inventories:
        move.know(persisted_step=joined.persisted_step)
    if ended is not None:
        close(move, *ended)
    elif plan is not None:
        move.do(ev.OpenStore(plan.generation + 1))
    # Who came first: with them, those who left may not be too many.
    return Resumed(move.state, tuple(move.effects), (*came, *gone, *backlog, *lost))


def _roster(
    plan: Plan,
    reports: Mapping[Worker, WorkerReport],
    leaving: Iterable[Worker],
) -> Roster:
    """What the members do. One that has left its generation is still inside here: how it left is
    in the backlog, and is judged as if it came now. So is one whose process is gone."""
    gone = set(leaving)
    ranks: dict[Status, list[int]] = {Status.ENTERED: [], Status.JOINED: [], Status.RESTORED: []}
    for member in plan.members:
        report = reports.get(member.worker)
        if report is None or member.worker in gone:
            status = Status.RESTORED
        elif report.status in ranks and report.generation == plan.generation:
            status = report.status
        else:  # not told to enter yet, for want of a lease
            status = Status.ENTERED
        ranks[status].append(member.rank)
    return Roster(
        entered=from_ranks(ranks[Status.ENTERED]),
        joined=from_ranks(ranks[Status.JOINED]),
        restored=from_ranks(ranks[Status.RESTORED]),
    )


def _waiting(plan: Plan, reports: Mapping[Worker, WorkerReport]) -> Roster:
    """The members at the end of the job: who has left its generation is let go in peace."""
    status = {m.rank: reports[m.worker].status for m in plan.members if m.worker in reports}
    outside = (Status.READY, Status.FINISHED)
    return Roster(
        ready=from_ranks([rank for rank, known in status.items() if known in outside]),
        restored=from_ranks([rank for rank, known in status.items() if known not in outside]),
    )


def _has_stepped(plan: Plan, report: WorkerReport) -> bool:
    return report.generation == plan.generation and report.step > plan.cut.step


def _extras(plan: Plan, reports: Mapping[Worker, WorkerReport]) -> dict[Worker, WorkerState]:
    """Those without a rank. Where its slot has another worker, it is a spare."""
    members = {member.worker for member in plan.members}
    taken = {member.slot for member in plan.members}
    return {
        worker: extra_of(report, taken)
        for worker, report in sorted(reports.items())
        if worker not in members
    }
