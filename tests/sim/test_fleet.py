"""The fleet in bulk: one seed, one trace; wrong plans are found; decisions are few."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from resilient.core import coordinator, transitions
from resilient.core import events as ev
from resilient.core.model import Config, Member, Plan, State
from resilient.sim.checkers import CheckFailed
from resilient.sim.fleet import Settings, draw, run

ROOT = Path(__file__).parents[2]
SMALL = Settings(
    num_nodes=200,
    node_days_a_failure=30.0,
    burst_share=0.02,
    config=Config(min_nodes=180, max_nodes=195),
)
SHORT = replace(
    SMALL,
    num_nodes=24,
    days=3.0,
    node_days_a_failure=3.0,
    config=Config(min_nodes=19, max_nodes=22, quorum_timeout_s=36_000.0),
)


def test_a_month_goes_on() -> None:
    counts = run(1, SMALL)
    assert counts.num_bursts >= 1
    assert counts.num_growths >= 1
    assert counts.num_rank_faults > 100
    assert counts.num_recoveries > 0.9 * counts.num_faults
    assert counts.world_size == 195 * 8
    assert counts.goodput > 0.98
    # The bound of the start: a node comes, and each worker, each spare, is ready.
    assert counts.num_decisions_to_start < (1 + 8 + 1) * 200 + 50
    # Since: a recovery is told in portions, and a node that comes back starts nine workers. Nothing
    # is told rank by rank: here that would be more than a thousand times each phase.
    since = counts.num_decisions - counts.num_decisions_to_start
    assert since < 30 * (counts.num_faults + counts.num_growths) + 12 * counts.num_nodes_lost


def test_what_befalls_it_is_the_seeds_alone() -> None:
    assert draw(3, SMALL) == draw(3, SMALL)
    assert draw(3, SMALL) != draw(4, SMALL)
    rate = len(draw(3, Settings())) / 30
    assert 17 < rate < 23, "10 nodes and as many ranks a day"


@pytest.mark.parametrize("seed", range(6))
def test_small_fleets(seed: int) -> None:
    """So small that nodes are often missing, and the minimum is reached."""
    first, again = run(seed, SHORT), run(seed, SHORT)
    assert first == again
    assert first.num_recoveries > 0


def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from resilient.core.model import Config; from resilient.sim.fleet import Settings, run;"
        "print(run(5, Settings(num_nodes=24, days=3.0, node_days_a_failure=3.0,"
        " config=Config(min_nodes=16, max_nodes=22))).trace_hash)"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert traces[0] == traces[1]


# ---------------------------------------------------------------- the checks bite

Change = Callable[[Plan, Plan], Plan]


def members(plan: Plan, *changed: Member) -> Plan:
    by_rank = {member.rank: member for member in changed}
    return replace(plan, members=tuple(by_rank.get(m.rank, m) for m in plan.members))


def swapped(plan: Plan, last: Plan) -> Plan:
    first, second, *others = plan.members
    return replace(plan, members=(second, first, *others))


def one_slot_twice(plan: Plan, last: Plan) -> Plan:
    return members(plan, replace(plan.members[1], slot=plan.members[0].slot))


def one_worker_twice(plan: Plan, last: Plan) -> Plan:
    return members(plan, replace(plan.members[1], worker=plan.members[0].worker))


def as_before(plan: Plan, last: Plan) -> Plan:
    """Somebody of them has just died."""
    return replace(plan, members=last.members)


def too_few(plan: Plan, last: Plan) -> Plan:
    return replace(plan, members=plan.members[: 8 * SHORT.config.min_nodes - 8])


def older(plan: Plan, last: Plan) -> Plan:
    return replace(plan, cut=replace(plan.cut, step=plan.cut.step - 1))


def a_holder_less(plan: Plan, last: Plan) -> Plan:
    return replace(plan, cut=replace(plan.cut, holders=plan.cut.holders[1:]))


def everybody_holds(plan: Plan, last: Plan) -> Plan:
    return replace(plan, cut=replace(plan.cut, holders=tuple(range(plan.world_size))))


def same_generation(plan: Plan, last: Plan) -> Plan:
    return replace(plan, generation=last.generation)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swapped, "ranks are not"),
        (one_slot_twice, "shares its slot"),
        (one_worker_twice, "or its worker"),
        (as_before, "which has left|which is gone"),
        (too_few, "18 nodes"),
        (older, "resumes from"),
        (a_holder_less, "resumes from"),
        (everybody_holds, "resumes from"),
        (same_generation, "generation 3 after 3"),
    ],
)
def test_a_wrong_plan_is_found(change: Change, says: str) -> None:
    """From the fifth plan on, the core is wrong in this way."""
    last: list[Plan] = []

    def decide(state: State, event: ev.Event, now_s: float) -> ev.Decision:
        decision = coordinator.step(state, event, now_s)
        effects = []
        for effect in decision.effects:
            if isinstance(effect, ev.PublishPlan | ev.StartGeneration):
                plan = effect.plan
                if plan.generation >= 4:
                    plan = change(plan, last[3])
                elif isinstance(effect, ev.PublishPlan):
                    last.append(plan)
                effect = type(effect)(plan)
            effects.append(effect)
        return decision._replace(effects=tuple(effects))

    with pytest.raises(CheckFailed, match=says):
        run(1, SHORT, decide)


def test_a_rank_that_is_not_told_to_leave_is_found() -> None:
    def decide(state: State, event: ev.Event, now_s: float) -> ev.Decision:
        decision = coordinator.step(state, event, now_s)
        effects = tuple(
            replace(effect, workers=effect.workers[1:])
            if isinstance(effect, ev.AbortGeneration)
            else effect
            for effect in decision.effects
        )
        return decision._replace(effects=effects)

    with pytest.raises(CheckFailed, match="not told"):
        run(1, SHORT, decide)


def test_a_core_that_never_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "growth_due_s", lambda state: None)
    # Nobody stands by, so whoever is lost and comes back can only be taken in by growing.
    with pytest.raises(CheckFailed, match="grows"):
        run(1, replace(SHORT, config=Config(min_nodes=12, max_nodes=24)))


def test_a_core_that_stops_is_found() -> None:
    """It never hears that all ranks are restored."""

    def decide(state: State, event: ev.Event, now_s: float) -> ev.Decision:
        told = event.event if isinstance(event, ev.Alike) else event
        if isinstance(told, ev.WorkerRestored) and told.generation >= 3:
            return ev.Decision(state)
        return coordinator.step(state, event, now_s)

    with pytest.raises(CheckFailed):
        run(1, SHORT, decide)
