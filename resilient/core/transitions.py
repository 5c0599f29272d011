"""What depends on everybody: the transitions between phases, each in one place.

`advance` runs after every event and takes every transition whose condition holds: all ranks have
reported, a replacement is there for every hole, all are restored, a bound is over. Handlers of
single events (coordinator.py) only record and, where it does not depend on others, react.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable

from resilient.core import events as ev
from resilient.core.capacity import growth_due_s, slots_of, usable_nodes
from resilient.core.cut import newest_cut
from resilient.core.membership import Membership, choose_members, held_by, members_of
from resilient.core.model import (
    INSIDE,
    Cut,
    CutKind,
    Fault,
    FaultKind,
    Member,
    Outcome,
    Phase,
    Plan,
    Roster,
    Slot,
    Status,
    Worker,
)
from resilient.core.move import Move
from resilient.core.policy import count_deaths, judge
from resilient.core.ranks import Ranks, from_ranks, full, iterate
from resilient.core.ranks import count as count_ranks

MAX_SPARE_DEATHS = 3
_NODE_OF = operator.attrgetter("node")
MAX_CUTS = 1000
SIGKILL_STATUS = -9


def terminate_group(move: Move, signum: int, reason: str) -> None:
    """Unmodified script: every process is asked to end, killed when its grace is over."""
    for worker in move.living():
        move.do(ev.TerminateWorker(worker, signum))
    move.enter(Phase.STOPPING, move.state.config.grace_s)
    move.why(reason)


def abort(move: Move, reason: str) -> None:
    assert move.state.plan is not None
    inside = move.inside()
    if inside:
        workers = tuple(move.workers(inside))
        move.do(ev.AbortGeneration(move.state.plan.generation, workers, reason))
    bound_s = max(move.state.config.interrupt_timeout_s, 3 * (move.state.usual_step_s or 0.0))
    move.set(extended=False)
    move.enter(Phase.STOPPING, bound_s)
    move.why(reason)


def count(move: Move, faults: Iterable[Fault]) -> None:
    state, excluded = count_deaths(move.state, tuple(faults))
    move.set(deaths=state.deaths)
    exclude(move, excluded)


def exclude(move: Move, slots: Iterable[Slot]) -> None:
    for slot in slots:
        move.set(excluded=move.state.excluded | {slot})
        died = move.state.deaths.get(slot, 0)
        move.do(ev.ExcludeSlot(slot, f"{died} deaths without a committed step"))


def staff(move: Move, only: str | None = None, *, needed: bool = False) -> None:
    """Spares where there are ranks; where there are none, a worker for each slot, to stand by.

    only: this node, which alone has changed; None: any may have.
    needed: also where nobody is to be replaced, since there are too few.
    """
    state = move.state
    needed = needed or state.config.replace or state.quorum_by_s is not None
    if not needed or not state.decorated or state.plan is None:
        return
    extras = state.extras.items()
    living = {w: k.slot for w, k in extras if not k.killed and only in (None, w.node)}
    have = Counter(map(_NODE_OF, living))
    taken = set(living.values())
    few = state.num_spare_deaths < MAX_SPARE_DEATHS
    spares = state.config.num_spares if state.config.replace and few else 0
    nodes = state.nodes.keys() if only is None else {only}
    short = {node for node in nodes if have.get(node, 0) < spares}
    for node in sorted(short | (nodes - state.plan.nodes)):
        if state.plan.ranks_on(node):
            for _ in range(spares - have[node]):
                move.launch(None, node)
        else:
            for slot in slots_of(state, node):
                if slot not in taken:
                    move.launch(slot, node)


def advance(move: Move) -> None:
    """Takes every transition whose condition holds now. Each leads to a later phase, or waits."""
    while True:
        before = move.state
        _ADVANCE[move.state.phase](move)
        if move.state.phase is before.phase or move.state.finished:
            return


def _advance_forming(move: Move) -> None:
    state = move.state
    if state.plan is None:
        if _wait_for_first_nodes(move):
            store = state.stores.get(state.num_restarts)
            if store is not None:
                _form(move, store)
    elif state.decorated:
        if move.expired and state.quorum_by_s is None:
            extras = move.state.extras
            late = [w for w in move.living(Status.STARTING) if w not in extras or extras[w].slot]
            kill_late(move, late, "not at the decorator in time")
            move.enter(Phase.FORMING, state.config.start_timeout_s)
        _try_plan(move)
    elif not state.roster.alive:
        close(move, Outcome.DONE, "every process of the script has ended with exit code 0")


def _wait_for_first_nodes(move: Move) -> bool:
    """Whether the first world is formed of the nodes that are there now."""
    state, config = move.state, move.state.config
    num_slots = sum(state.nodes.values()) - sum(s.node in state.nodes for s in state.excluded)
    num_nodes = len(usable_nodes(state))
    few = ""
    if num_nodes < config.min_nodes:
        few = f"{num_nodes} of at least {config.min_nodes} nodes are there"
    elif num_slots < max(config.min_world_size, 1):
        few = f"{num_slots} of at least {config.min_world_size} slots are there"
    if few:
        move.set(last_call_over=False)
        if state.nodes or state.quorum_by_s is not None:
            _wait_for_nodes(move, few)
        else:  # the bound of a last call that all have left
            move.set(deadline_s=None)
        return False
    if num_nodes >= config.max_nodes or state.last_call_over:
        move.set(deadline_s=None, quorum_by_s=None)
        return True
    if state.quorum_by_s is not None or state.deadline_s is None:
        move.set(quorum_by_s=None)
        move.enter(Phase.FORMING, config.last_call_s)
    elif move.expired:
        move.set(last_call_over=True, deadline_s=None)
        return True
    return False


def _wait_for_nodes(move: Move, why: str) -> None:
    """There are fewer nodes or ranks than the minimum: state is kept until more come, or for long
    enough."""
    config = move.state.config
    by_s = move.state.quorum_by_s
    if by_s is None and move.state.may_grow:
        by_s = move.now_s + config.quorum_timeout_s
        move.set(quorum_by_s=by_s)
        staff(move)
        move.why(f"{why}: waiting for others")
    if by_s is None or move.now_s >= by_s:
        end(move, Outcome.UNRECOVERABLE, why)
    else:
        move.set(deadline_s=by_s)


def kill_late(move: Move, workers: Iterable[Worker], reason: str) -> None:
    """Kills workers that do not reach the decorator; each counts as a death of its slot."""
    for worker in workers:
        note = {"status": SIGKILL_STATUS, "note": reason}
        move.fault(FaultKind.HUNG, worker, 0, **note)
        move.kill([worker], reason)
        count(move, move.state.faults[-1:])


def _form(move: Move, store: tuple[str, int]) -> None:
    """The first plan: a worker in every slot, ranks in the order of nodes and slots."""
    nodes = sorted(usable_nodes(move.state))[: move.state.config.max_nodes]
    slots = [slot for node in nodes for slot in slots_of(move.state, node)]
    first = move.state.next_number
    there = {known.slot: w for w, known in sorted(move.state.extras.items()) if not known.killed}
    members = tuple(
        Member(rank, slot, there.get(slot) or Worker(slot.node, first + rank))
        for rank, slot in enumerate(slots)
    )
    generation = move.state.num_restarts
    plan = Plan(generation, members, store, Cut(CutKind.INITIAL, 0))
    statuses: dict[Status, list[int]] = {Status.STARTING: [], Status.READY: []}
    for member in members:
        known = move.state.extras.get(member.worker)
        statuses[known.status if known else Status.STARTING].append(member.rank)
    roster = Roster(
        starting=from_ranks(statuses[Status.STARTING]), ready=from_ranks(statuses[Status.READY])
    )
    extras = {w: k for w, k in move.state.extras.items() if plan.rank_of(w) is None}
    new = [member for member in members if member.worker not in move.state.extras]
    move.set(plan=plan, roster=roster, extras=extras, next_number=first + len(members))
    for member in new:
        move.do(ev.StartWorker(member.worker, member.slot, plan, generation))
    move.why(f"starting {len(new)} workers")
    if move.state.decorated:
        move.enter(Phase.FORMING, move.state.config.start_timeout_s)


def _advance_stopping(move: Move) -> None:
    if not move.state.decorated:
        _advance_stopping_script(move)
        return
    inside = move.inside()
    if not inside and not move.state.roster.killed:
        _decide(move)
    elif move.expired:
        _enforce(move, inside)


def _enforce(move: Move, inside: Ranks) -> None:
    """The bound of STOPPING is over: those still inside are killed; the killed count as gone."""
    config = move.state.config
    if not inside:
        killed = move.workers(move.state.roster.killed)
        slots = [member.slot for member in map(move.member, killed) if member is not None]
        for slot in slots:
            move.do(ev.ExcludeSlot(slot, "its process does not end after SIGKILL"))
        # What they left on disk, they have not told.
        move.set(excluded=move.state.excluded.union(slots), look_due=True)
        move.drop(killed)
        _decide(move)
        return
    held, _ = _newest_held(move)
    at_least = max(move.state.committed_step, move.state.plan.cut.step if move.state.plan else 0)
    may_extend = not (held >= at_least or move.state.extended or move.drain_is_over)
    if may_extend and move.state.committed_step > 0:
        move.set(extended=True)
        move.enter(Phase.STOPPING, config.last_holder_timeout_s)
        move.why("the last ranks to hold the state get more time")
        return
    move.do(ev.DumpStacks(tuple(move.workers(inside))))
    kill_hung(move, inside, "did not leave its generation in time")
    move.enter(Phase.STOPPING, config.kill_timeout_s)
    move.why(f"killing {count_ranks(inside)} ranks that did not come out")


def kill_hung(move: Move, ranks: Ranks, why: str) -> None:
    """Kills ranks that cannot or do not come out. What was seen of the hang stays with them."""
    seen = next((fault for fault in move.state.faults if fault.kind is FaultKind.HUNG), None)
    move.faults_of(
        FaultKind.HUNG,
        ranks,
        move.state.committed_step,
        began_s=seen.began_s if seen else None,
        status=SIGKILL_STATUS,
        note="; ".join(filter(None, (why, seen.note if seen else ""))),
    )
    move.kill_ranks(ranks, why)


def _advance_stopping_script(move: Move) -> None:
    """Unmodified script: all gone, then the whole group again or the end."""
    state = move.state
    if move.anyone:
        if move.expired:
            if move.anyone_living:
                move.kill(move.living(), "its grace is over")
                move.enter(Phase.STOPPING, state.config.kill_timeout_s)
            else:  # SIGKILL does not take: nothing of ours can end these
                move.drop_all()
        if move.anyone:
            return
    if state.draining is not None:
        close(move, Outcome.SIGNALLED, f"asked to stop by signal {state.draining}")
    elif state.num_restarts < state.config.max_restarts:
        move.set(num_restarts=state.num_restarts + 1, plan=None, roster=Roster(), faults=())
        move.do(ev.OpenStore(move.state.num_restarts))
        move.enter(Phase.FORMING)
        move.why(f"restart {move.state.num_restarts} of {state.config.max_restarts}")
    else:
        close(move, Outcome.SCRIPT_FAILED, "a process of the script failed")


def _decide(move: Move) -> None:
    """Everyone has reported or is dead: root cause, verdict, and on to the next membership."""
    verdict = judge(move.state)
    move.state = verdict.state
    exclude(move, verdict.excluded)
    move.enter(Phase.COLLECTING, move.state.config.rendezvous_timeout_s)
    if verdict.outcome is None:
        move.why(verdict.reason)
    else:
        end(move, verdict.outcome, verdict.reason)


def _advance_collecting(move: Move) -> None:
    if move.state.outcome is None:
        _try_plan(move)
        return
    holder = move.state.persisting
    if holder is not None and (move.worker(holder) is None or move.expired):
        move.set(persisting=None)
        end(move, move.state.outcome, move.state.outcome_reason, given_up=move.expired)


def _try_plan(move: Move) -> None:
    """Publishes the next plan when every slot has a ready worker, or the wait for it is over."""
    late = move.expired and move.now_s >= (move.state.quorum_by_s or move.now_s)
    if late:  # whoever was late once already is stuck, and would be waited for each time
        extras = move.state.extras.items()
        stuck = [w for w, known in extras if known.status is Status.STARTING and known.slot is None]
        move.kill(sorted(stuck), "not at the decorator in time")
    chosen = choose_members(move.state, give_up_waiting=late)
    if not _is_quorum(move, chosen, late):
        return
    state, last = move.state, move.state.plan
    assert last is not None
    cut = newest_cut(
        held_by(state, chosen),
        committed_step=state.committed_step,
        persisted_step=state.persisted_step,
    )
    waits = chosen.holder_comes or _looks_at_disk(move, chosen, cut) or _may_hold_more(move, cut)
    # A job that persists may learn of a checkpoint from a worker that is still to come.
    if cut is None and not waits and not (chosen.waiting and state.config.persists):
        end(
            move,
            Outcome.UNRECOVERABLE,
            f"no copy of step {state.committed_step} is left, in memory or on disk: every rank "
            "died or was changing its state (a collective between optimizer.step() and the next "
            "batch belongs in job.section); --checkpoint-dir would have kept one",
        )
        return
    for slot in chosen.to_start:
        move.launch(slot, slot.node)
    if chosen.to_start:
        move.why(f"starting workers for {len(chosen.to_start)} slots")
    if waits or chosen.waiting:
        return
    if _may_train_elsewhere(move):
        return
    forming = state.phase is Phase.FORMING
    generation = last.generation + (0 if forming else 1)
    store = state.stores.get(generation)
    if store is None:
        if late:
            end(move, Outcome.UNRECOVERABLE, "no store could be opened for the next generation")
        return
    assert cut is not None  # nothing is waited for
    members = members_of(state, chosen)
    first_world_size = last.first_world_size or len(members)
    plan = Plan(generation, members, store, cut, first_world_size)
    _publish(move, plan, chosen.substitutes.values())


def _is_quorum(move: Move, chosen: Membership, late: bool) -> bool:
    """Whether enough nodes and ranks are there, or on their way; else the job waits, or ends."""
    state, config = move.state, move.state.config
    num_nodes, size = chosen.num_nodes, chosen.world_size
    least = max(config.min_world_size, 1)
    if size >= least and num_nodes >= config.min_nodes:
        if state.quorum_by_s is not None:
            _wait_for_workers(move)
        return True
    if late and state.may_grow:  # those that were to come in are stuck, and count as dead
        extras = state.extras.items()
        slow = [w for w, k in extras if k.status is not Status.READY and not k.killed]
        kill_late(move, sorted(slow), "not at the decorator in time")
    more_nodes, more_slots = chosen.coming
    if size + more_slots >= least and num_nodes + more_nodes >= config.min_nodes:
        if late or state.quorum_by_s is not None:
            _wait_for_workers(move)
        staff(move, needed=True)
        return False
    few = f"{size} ranks can go on, fewer than the minimum of {config.min_world_size}"
    if size >= least:
        few = f"{num_nodes} nodes can go on, fewer than the minimum of {config.min_nodes}"
    _wait_for_nodes(move, few)
    return False


def _wait_for_workers(move: Move) -> None:
    """Enough nodes are there (again): the phase's own bound counts."""
    move.set(quorum_by_s=None)
    config, forming = move.state.config, move.state.phase is Phase.FORMING
    bound_s = config.start_timeout_s if forming else config.rendezvous_timeout_s
    move.enter(move.state.phase, bound_s)


def _may_hold_more(move: Move, cut: Cut | None) -> bool:
    """Whether a newer step than the cut's may come from workers of nodes that were lost: such as
    are back and still on their way out of their generation, or, where there is no other copy at
    all, such as are still away."""
    state = move.state
    if cut is not None and cut.step >= state.committed_step and not _is_unsure(move, cut):
        return False
    leaving = any(k.status in INSIDE and not k.killed for k in state.extras.values())
    if leaving and not move.expired:
        return True
    if not state.away:
        return False
    if cut is not None and cut.kind is CutKind.DISK:
        return _wait_until(move, state.soon_until_s, "nodes that are away may hold a newer step")
    if cut is not None and not _is_unsure(move, cut):
        return False
    return _wait_until(move, state.away_until_s, "only nodes that are away may hold the state")


def _is_unsure(move: Move, cut: Cut) -> bool:
    """Whether a start from nothing or from disk may throw steps away that nobody here knows of."""
    return move.state.unsure and cut.kind is not CutKind.MEMORY


def _looks_at_disk(move: Move, chosen: Membership, cut: Cut | None) -> bool:
    """Whether somebody is to say first what is on disk: ranks that were lost with their nodes may
    have left a newer step there than anybody has told of."""
    state = move.state
    newest = cut is not None and cut.kind is CutKind.MEMORY and cut.step >= state.committed_step
    needed = state.look_due or (cut is None and not state.looked)
    if not needed or not state.config.persists or newest or move.expired:
        return False
    if state.looking is not None and move.worker(state.looking) is not None:
        return True
    ready = [chosen.substitutes[rank] for rank in sorted(chosen.substitutes)]
    ready = ready or move.workers(chosen.filled)[:1]
    if not ready:
        return False
    move.set(looking=ready[0])
    move.do(ev.Look(ready[0]))
    move.why("looking for what is on disk")
    return True


def _wait_until(move: Move, until_s: float | None, why: str) -> bool:
    """Waits for nodes that were cut off; False: that is over."""
    if until_s is None or move.now_s >= until_s:
        return False
    if move.state.deadline_s != until_s:
        move.set(deadline_s=until_s)
        move.why(f"{why}: waiting")
    return True


def _may_train_elsewhere(move: Move) -> bool:
    """Whether all ranks of the last generation may still be in it, cut off from here together.

    One that is known to be out of it is enough: no step is complete without it. A generation on a
    single node has stopped by itself before its lease ended.
    """
    state = move.state
    assert state.plan is not None
    if full(state.plan.world_size) & ~state.silent or state.plan.num_nodes == 1:
        return False
    why = "nobody of the last generation can be asked, and it may still train"
    return _wait_until(move, state.orphans_until_s, why)


def _publish(move: Move, plan: Plan, newcomers: Iterable[Worker]) -> None:
    _hand_over(move, plan, newcomers)
    # Who has no rank now came too late for its slot, or has lost it: a spare, from here on.
    extras = move.state.extras.items()
    with_slot = sorted(w for w, known in extras if known.slot is not None and not known.killed)
    for worker in with_slot:
        if move.state.extras[worker].slot in move.state.excluded:
            move.kill([worker], "its slot is excluded")
        elif plan.ranks_on(worker.node):
            move.change(worker, slot=None)
    stores = {g: s for g, s in move.state.stores.items() if g > plan.generation}
    move.set(stores=stores, stepped=False, faults=(), began_s=move.now_s)
    move.set(silent=0, orphans_until_s=None, quorum_by_s=None)
    move.set(look_due=False, looked=False, looking=None, unsure=False)
    _continue_from(move, plan)
    if plan.cut.kind is not CutKind.INITIAL:
        move.know(plan.cut.step)
    move.do(ev.PublishPlan(plan), ev.StartGeneration(plan), ev.OpenStore(plan.generation + 1))
    move.enter(Phase.RESTORING)
    move.why(f"generation {plan.generation}: {plan.world_size} ranks from step {plan.cut.step}")


def _continue_from(move: Move, plan: Plan) -> None:
    """What was committed beyond the cut, and is not part of it, is of no use from here on."""
    step = plan.cut.step
    kept = tuple(cut for cut in move.state.cuts if cut[1] < step)[-MAX_CUTS:]
    move.set(cuts=(*kept, (plan.generation, step)))
    held = [(w, known) for w, known in move.state.extras.items() if known.holdings]
    for worker, known in held:
        move.change(worker, holdings=move.usable(known.holdings, known.generation))


def _hand_over(move: Move, plan: Plan, newcomers: Iterable[Worker]) -> None:
    """From the last plan to this one; a process whose rank another one has now is an extra.

    newcomers: extras until now.
    """
    last = move.state.plan
    assert last is not None
    changed = plan.changes_since(last)
    plan.share_index(last, changed)
    maybe_out = from_ranks((*changed, *range(plan.world_size, last.world_size)))
    extras = move.own_extras()
    for rank in iterate(maybe_out & move.state.roster.alive):
        worker, known = last.members[rank].worker, move.state.member_state(rank)
        if known is not None and plan.rank_of(worker) is None:
            extras[worker] = known
    for worker in newcomers:  # one may have got the very rank that it had before it was lost
        del extras[worker]
    move.set(plan=plan, roster=Roster(entered=full(plan.world_size)))


def _advance_restoring(move: Move) -> None:
    roster = move.state.roster
    if not roster.entered | roster.joined:
        move.enter(Phase.RUNNING)
        move.set(num_spare_deaths=0)
        staff(move)
        move.why("every rank is restored")


def _advance_running(move: Move) -> None:
    assert move.state.plan is not None
    if count_ranks(move.state.roster.finished) == move.state.plan.world_size:
        close(move, Outcome.DONE, "every rank has finished")
        return
    if move.state.stepped and any(map(move.state.plan.has_slot, move.state.excluded)):
        abort(move, "others hold now what an excluded slot held alone")
        return
    due_s = growth_due_s(move.state)
    if due_s is not None and move.now_s >= due_s:
        abort(move, "taking in nodes that stand by")
    elif due_s != move.state.deadline_s:
        move.set(deadline_s=due_s)


# ---------------------------------------------------------------- the end


def end(move: Move, outcome: Outcome, reason: str, *, given_up: bool = False) -> None:
    """The job ends with this outcome; first, what memory holds beyond the disk goes there."""
    move.set(outcome=outcome, outcome_reason=reason)
    newest, holder = _newest_held(move)
    given_up = given_up or move.drain_is_over
    worth_it = move.state.config.persists and newest > (move.state.persisted_step or 0)
    if holder is not None and worth_it and not given_up:
        move.set(persisting=holder)
        move.do(ev.Persist(holder, newest))
        move.enter(Phase.COLLECTING, move.state.config.grace_s)
        move.why(f"{reason}; writing step {newest} to disk")
        return
    close(move, outcome, reason)


def _newest_held(move: Move) -> tuple[int, Worker | None]:
    """The newest step that a waiting worker holds, and the first worker that does; or (0, None)."""
    held = move.held()
    held_alone = [
        (holding.step, worker)
        for worker, known in sorted(move.state.extras.items())
        if not known.killed and known.status in (Status.READY, Status.FINISHED)
        for holding in known.holdings
    ]
    steps = [holding.step for _, holdings in held for holding in holdings]
    newest = max((*steps, *(step for step, _ in held_alone)), default=0)
    ranks = 0
    for group, holdings in held:
        if any(holding.step == newest for holding in holdings):
            ranks |= group
    workers = move.workers(ranks)[:1] + [worker for step, worker in held_alone if step == newest]
    return newest, min(workers, default=None)


def close(move: Move, outcome: Outcome, reason: str) -> None:
    """Lets everybody go; the end comes when all processes are gone."""
    move.set(outcome=outcome, outcome_reason=reason)
    waiting = 0 if move.drain_is_over else move.state.roster.waiting
    listening = move.workers(waiting & ~move.state.roster.killed)
    listen = set(listening)
    move.kill([w for w in move.living() if w not in listen], "the job has ended")
    if outcome is Outcome.DONE:
        if listening:
            move.do(ev.Close(tuple(listening)))
        move.enter(Phase.CLOSED)
    else:
        if listening:
            move.do(ev.Stop(tuple(listening), outcome, reason))
        config = move.state.config
        move.enter(Phase.CLOSED, config.grace_s if listening else config.kill_timeout_s)
    move.why(reason)


def _advance_closed(move: Move) -> None:
    if move.anyone and not move.anyone_living and move.state.deadline_s is None:
        move.enter(Phase.CLOSED, move.state.config.kill_timeout_s)  # scripts are done; spares die
    if move.anyone and move.expired:
        if move.anyone_living:
            move.kill(move.living(), "its grace is over")
            move.enter(Phase.CLOSED, move.state.config.kill_timeout_s)
        else:
            move.drop_all()
            move.why("some processes do not end after SIGKILL")
    if not move.anyone:
        assert move.state.outcome is not None
        move.set(finished=True, deadline_s=None)
        cause = None if move.state.outcome is Outcome.DONE else move.state.root_cause
        move.do(ev.Finish(move.state.outcome, cause, move.state.outcome_reason))


_ADVANCE: dict[Phase, Callable[[Move], None]] = {
    Phase.FORMING: _advance_forming,
    Phase.RUNNING: _advance_running,
    Phase.STOPPING: _advance_stopping,
    Phase.COLLECTING: _advance_collecting,
    Phase.RESTORING: _advance_restoring,
    Phase.CLOSED: _advance_closed,
}
