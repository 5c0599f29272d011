"""Sets of ranks, and what is kept with them: nothing differs from a record for each rank."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from resilient.core import coordinator, cut, ranks
from resilient.core import events as ev
from resilient.core.model import (
    Config,
    Cut,
    CutKind,
    Holding,
    Member,
    Phase,
    Plan,
    Roster,
    Slot,
    State,
    Status,
    Worker,
)

WIDTHS = (0, 1, 2, 17, 64, 300)


def some_sets(num_sets: int = 300) -> list[set[int]]:
    rng = random.Random(5)
    sets: list[set[int]] = [set(range(width)) for width in WIDTHS]
    for _ in range(num_sets):
        width, share = rng.choice(WIDTHS), rng.choice([0.01, 0.5, 0.99])
        sets.append({rank for rank in range(width) if rng.random() < share})
    return sets


def test_a_set_and_back() -> None:
    for wanted in some_sets():
        mask = ranks.from_ranks(random.Random(1).sample(sorted(wanted), len(wanted)))
        assert mask == sum(ranks.bit(rank) for rank in wanted)
        assert list(ranks.iterate(mask)) == sorted(wanted)
        assert ranks.count(mask) == len(wanted)
        assert [rank for rank in range(310) if ranks.has(mask, rank)] == sorted(wanted)
        spans = ranks.spans(mask)
        assert ranks.from_spans(spans) == mask
        assert [r for first, last in spans for r in range(first, last + 1)] == sorted(wanted)
        assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(spans))
    assert ranks.full(0) == 0 and list(ranks.iterate(ranks.full(70))) == list(range(70))


def test_a_large_set_can_be_shown() -> None:
    """Python refuses to write out a number of 80,000 bits; a failing test must be able to."""
    large = ranks.full(80_000) & ~ranks.bit(7)
    assert ranks.show(large) == "0-6,8-79999" and ranks.show(0) == "-"
    state = State(Config(), roster=Roster(ready=large, holdings=((large, (Holding(5),)),)))
    assert "ready=0-6,8-79999" in repr(state)


# ---------------------------------------------------------------- the roster


def test_the_roster_is_a_record_for_each_rank() -> None:
    rng = random.Random(9)
    roster = Roster(starting=ranks.full(12))
    known = dict.fromkeys(range(12), (Status.STARTING, ()))
    held = [(), (Holding(4),), (Holding(5),), (Holding(4, "undo"),)]
    for _ in range(500):
        some = set(rng.sample(sorted(known), rng.randint(0, len(known))))
        if rng.random() < 0.05 and len(known) > 3:
            roster = roster.without(ranks.from_ranks(list(some)[:1]))
            known = {rank: was for rank, was in known.items() if rank not in list(some)[:1]}
        else:
            status, holdings = rng.choice(list(Status)), rng.choice(held)
            roster = roster.put(ranks.from_ranks(some), status, holdings)
            known |= dict.fromkeys(some, (status, holdings))
        assert set(ranks.iterate(roster.alive)) == set(known)
        for rank, was in known.items():
            assert (roster.status_of(rank), roster.holdings_of(rank)) == was
        assert all(group and what for group, what in roster.holdings)
        assert len({what for _, what in roster.holdings}) == len(roster.holdings)


def test_a_kill_is_forgotten_with_the_process() -> None:
    roster = Roster(ready=0b11, killed=0b01).put(0b01, Status.READY, (Holding(3),))
    assert roster.killed == 0b01
    assert roster.without(0b01) == Roster(ready=0b10)


# ---------------------------------------------------------------- plans


def plan(*workers: Worker, generation: int = 0, slots: tuple[Slot, ...] = ()) -> Plan:
    slots = slots or tuple(Slot(w.node, rank) for rank, w in enumerate(workers))
    members = tuple(Member(r, s, w) for r, (s, w) in enumerate(zip(slots, workers, strict=True)))
    return Plan(generation, members, ("h", 1), Cut(CutKind.INITIAL, 0))


def test_a_plan_finds_workers_slots_and_nodes() -> None:
    some = plan(Worker("a", 0), Worker("b", 1), Worker("a", 2))
    assert [some.rank_of(Worker("a", n)) for n in range(3)] == [0, None, 2]
    assert (some.rank_at(Slot("b", 1)), some.rank_at(Slot("b", 0))) == (1, None)
    assert some.ranks_on("a") == (0, 2) and some.ranks_on("c") == ()


def test_what_changed_between_plans_and_the_shared_index() -> None:
    rng = random.Random(3)
    old = plan(*(Worker(f"n{n % 5}", n) for n in range(20)))
    for number in range(200):
        members = [m for m in old.members if rng.random() < 0.9]
        for _ in range(rng.randint(0, 3)):
            slot = Slot(f"n{rng.randrange(6)}", number)
            members.insert(rng.randint(0, len(members)), Member(0, slot, Worker(slot.node, -1)))
        dense = (m if m.rank == r else Member(r, m.slot, m.worker) for r, m in enumerate(members))
        new = Plan(number, tuple(dense), ("h", 1), old.cut)
        changed = new.changes_since(old)
        last = dict(enumerate(old.members))
        assert changed == tuple(m.rank for m in new.members if m != last.get(m.rank))
        new.share_index(old, changed)
        fresh = Plan(number, new.members, ("h", 1), old.cut)
        for node in (f"n{n}" for n in range(6)):
            assert new.ranks_on(node) == fresh.ranks_on(node)
        assert new == fresh
        if new.members:
            old = new


def test_a_new_plan_keeps_the_members_that_stay() -> None:
    state, plans = world(6)
    state = feed(state, ev.WorkerReady(Worker("n0", 6)))
    state = feed(state, ev.WorkerExited(Worker("n0", 2), -9))
    state = feed(state, ev.Alike(interrupted(0), ((0, 1), (3, 5))), plans)
    assert state.phase is Phase.RESTORING and plans[-1].generation == 1
    same = [a is b for a, b in zip(plans[0].members, plans[-1].members, strict=True)]
    assert same == [True, True, False, True, True, True]
    assert plans[-1].members[2].worker == Worker("n0", 6)
    assert plans[-1].ranks_on("n0") is plans[0].ranks_on("n0")


# ---------------------------------------------------------------- many ranks at once


def interrupted(generation: int, step: int = 5) -> ev.WorkerInterrupted:
    return ev.WorkerInterrupted(Worker("n0", 0), generation, step, (Holding(step),))


def feed(state: State, event: ev.Event, plans: list[Plan] | None = None) -> State:
    decision = coordinator.step(state, event, 10.0)
    if plans is not None:
        plans += [effect.plan for effect in decision.effects if isinstance(effect, ev.PublishPlan)]
    return decision.state


def world(num_slots: int) -> tuple[State, list[Plan]]:
    """It trains in generation 0, told rank by rank."""
    plans: list[Plan] = []
    state = feed(coordinator.initial(Config()), ev.NodeJoined("n0", num_slots))
    state = feed(state, ev.StoreOpened(0, "h", 1))
    for number in range(num_slots):
        state = feed(state, ev.WorkerReady(Worker("n0", number)), plans)
    for number in range(num_slots):
        state = feed(state, ev.WorkerJoined(Worker("n0", number), 0))
        state = feed(state, ev.WorkerRestored(Worker("n0", number), 0))
    assert state.phase is Phase.RUNNING
    return feed(state, ev.StoreOpened(1, "h", 2)), plans


@pytest.mark.parametrize("spans", [((0, 5),), ((0, 1), (3, 3)), ((4, 9),)])
@pytest.mark.parametrize("generation", [0, 1])
@pytest.mark.parametrize("setting", ["running", "stopping", "restoring"])
def test_alike_is_the_same_as_one_by_one(
    spans: tuple[tuple[int, int], ...], generation: int, setting: str
) -> None:
    """But for what is said on the way: who is told to leave, and why."""
    state, plans = world(6)
    if setting != "running":
        state = feed(state, ev.WorkersHung(0, (Worker("n0", 3),), 5, 1.0))
    if setting == "restoring":
        state = feed(state, ev.Alike(interrupted(0), ((0, 5),)), plans)
        assert state.phase is Phase.RESTORING
    assert state.plan is not None
    first = state.plan.members[0].worker
    for event in (
        ev.WorkerJoined(first, generation),
        ev.WorkerRestored(first, generation),
        ev.WorkerStepped(first, generation, 6),
        interrupted(generation, 6),
        ev.WorkerFinished(first, generation, 6, (Holding(6),)),
    ):
        at_once = feed(state, ev.Alike(event, spans))
        one_by_one = state
        for rank in (rank for a, b in spans for rank in range(a, min(b, 5) + 1)):
            event = dataclasses.replace(event, worker=state.plan.members[rank].worker)
            one_by_one = feed(one_by_one, event)
        assert at_once == one_by_one, event


def test_sources_are_found_as_they_are_defined() -> None:
    rng = random.Random(2)
    for _ in range(50):
        size = rng.randint(2, 20)
        holders = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
        memory = Cut(CutKind.MEMORY, 5, holders)
        receivers = [rank for rank in range(size) if rank not in holders]
        for rank in range(size):
            wanted = None
            if rank in receivers:
                wanted = holders[receivers.index(rank) % len(holders)]
            assert cut.source_of(memory, rank, size) == wanted
    with pytest.raises(ValueError, match="not in a world of 2"):
        cut.source_of(Cut(CutKind.MEMORY, 5, (0,)), 2, 2)
