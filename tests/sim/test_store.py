"""The simulated store keeps its rules: leases, elections, conditional writes, one stream."""

from __future__ import annotations

import pytest

from resilient.core import events as ev
from resilient.core.changes import (
    Change,
    Closed,
    LeaderChanged,
    NodeArrived,
    NodeGone,
    Ordered,
    Published,
    Reported,
)
from resilient.core.model import Cut, CutKind, Member, Outcome, Plan, Slot, Worker
from resilient.sim.store import JobClosed, LeaseLost, NameTaken, NotLeader, Stale, Store

TTL_S = 10.0


def make() -> tuple[Store, list[Change]]:
    told: list[Change] = []
    return Store(TTL_S, told.append), told


def plan(generation: int, port: int = 1) -> Plan:
    member = Member(0, Slot("n0", 0), Worker("n0", generation))
    return Plan(generation, (member,), ("n0", port), Cut(CutKind.INITIAL, 0))


def order(term: int, number: int) -> Ordered:
    return Ordered(term, number, (ev.DumpStacks(()),))


def lead(store: Store, node: str = "n0", now_s: float = 0.0) -> tuple[int, int]:
    incarnation = store.register(node, 2, now_s)
    term = store.campaign(node, incarnation, lambda term: None)
    assert term is not None
    return incarnation, term


def test_a_name_is_taken_while_its_lease_lives() -> None:
    store, told = make()
    first = store.register("n0", 2, 0.0)
    with pytest.raises(NameTaken):
        store.register("n0", 2, 1.0)
    store.keep_alive("n0", first, 5.0)
    store.expire(14.9)
    assert store.is_alive("n0", first)
    store.expire(15.0)
    assert not store.is_alive("n0", first)
    assert store.register("n0", 2, 15.0) > first
    assert told[1] == NodeGone("n0", first, certain=False)
    with pytest.raises(LeaseLost):
        store.keep_alive("n0", first, 15.0)


def test_leaving_is_certain_and_takes_the_leadership_along() -> None:
    store, told = make()
    incarnation, term = lead(store)
    store.leave("n0", incarnation, certain=True)
    assert told == [
        NodeArrived("n0", incarnation, 2),
        LeaderChanged("n0", term),
        NodeGone("n0", incarnation, certain=True),
        LeaderChanged(None, term),
    ]


def test_the_next_candidate_leads_when_the_lease_of_the_leader_ends() -> None:
    store, told = make()
    elected: list[int] = []
    lead(store)
    other = store.register("n1", 2, 5.0)
    assert store.campaign("n1", other, elected.append) is None
    assert store.campaign("n1", other, elected.append) is None  # asked again: stands once
    store.expire(TTL_S)
    assert (store.leader, elected) == ("n1", [2])
    assert told[-3:] == [NodeGone("n0", 1, False), LeaderChanged(None, 1), LeaderChanged("n1", 2)]


def test_a_term_is_led_once() -> None:
    store, told = make()
    incarnation, term = lead(store)
    assert store.campaign("n0", incarnation, lambda term: None) == term + 1
    with pytest.raises(NotLeader):
        store.write("n0", incarnation, term, order(term, 1))
    store.resign("n0", incarnation, term)  # comes late
    assert store.leader == "n0"
    store.resign("n0", incarnation, term + 1)
    assert told[-1] == LeaderChanged(None, term + 1)


def test_a_deposed_leader_writes_nothing() -> None:
    store, told = make()
    incarnation, term = lead(store)
    store.expire(TTL_S)
    with pytest.raises(LeaseLost):
        store.write("n0", incarnation, term, order(term, 1))
    again = store.register("n0", 2, TTL_S)
    with pytest.raises(NotLeader):
        store.write("n0", again, term, order(term, 1))
    new_term = store.campaign("n0", again, lambda term: None)
    assert new_term == term + 1
    with pytest.raises(NotLeader):
        store.write("n0", again, term, Published(plan(0)))
    assert not any(isinstance(change, (Ordered, Published)) for change in told)


def test_one_plan_a_generation_and_the_same_plan_again_is_no_error() -> None:
    store, told = make()
    incarnation, term = lead(store)
    store.write("n0", incarnation, term, Published(plan(3)))
    store.write("n0", incarnation, term, Published(plan(3), {"n0": 1}))
    for stale in (plan(3, port=2), plan(2)):
        with pytest.raises(Stale):
            store.write("n0", incarnation, term, Published(stale))
    assert [c for c in told if isinstance(c, Published)] == [Published(plan(3))]


def test_an_order_is_there_once() -> None:
    store, told = make()
    incarnation, term = lead(store)
    for _ in range(2):
        store.write("n0", incarnation, term, order(term, 1))
    assert told.count(order(term, 1)) == 1


def test_orders_are_kept_until_the_plan_after_the_next() -> None:
    store, _ = make()
    incarnation, term = lead(store)

    def write(*records: Published | Ordered) -> list[Change]:
        for record in records:
            store.write("n0", incarnation, term, record)
        return [change for change in store.snapshot() if isinstance(change, Ordered)]

    assert write(order(term, 1), Published(plan(0)), order(term, 2)) == [
        order(term, 1),
        order(term, 2),
    ]
    assert write(Published(plan(1))) == [order(term, 2)]
    assert write(order(term, 3), Published(plan(2))) == [order(term, 3)]


def test_reports_go_with_the_lease_and_are_stored_once() -> None:
    store, told = make()
    incarnation = store.register("n0", 2, 0.0)
    event = ev.DrainRequested(15)
    store.report("n0", incarnation, [(1, event), (2, event)])
    store.report("n0", incarnation, [(1, event)])  # late
    store.report("n0", incarnation, [(2, event), (3, event)])
    for _ in range(2):
        store.advise("n0", incarnation, event)
    numbers = [change.number for change in told if isinstance(change, Reported)]
    assert numbers == [1, 2, 3, 0, 0]
    store.forget("n0", incarnation, 1)
    kept = [change.number for change in store.snapshot() if isinstance(change, Reported)]
    assert kept == [2, 3]
    store.leave("n0", incarnation, certain=False)
    with pytest.raises(LeaseLost):
        store.report("n0", incarnation, [(4, event)])
    assert store.snapshot() == []


def test_a_snapshot_tells_what_there_is_in_order() -> None:
    store, _ = make()
    incarnation, term = lead(store)
    other = store.register("n1", 4, 0.0)
    event = ev.DrainRequested(15)
    store.report("n1", other, [(1, event)])
    store.write("n0", incarnation, term, order(term, 1))
    store.write("n0", incarnation, term, Published(plan(0)))
    store.write("n0", incarnation, term, Closed("done", Outcome.DONE))
    assert store.snapshot() == [
        NodeArrived("n0", incarnation, 2),
        NodeArrived("n1", other, 4),
        LeaderChanged("n0", term),
        Published(plan(0)),
        order(term, 1),
        Reported("n1", other, 1, event),
        Closed("done", Outcome.DONE),
    ]


def test_nothing_follows_the_end() -> None:
    store, told = make()
    incarnation, term = lead(store)
    closed = Closed("done", Outcome.DONE)
    store.write("n0", incarnation, term, closed)
    store.write("n0", incarnation, term, closed)  # a retry
    with pytest.raises(JobClosed):
        store.write("n0", incarnation, term, Published(plan(0)))
    with pytest.raises(JobClosed):
        store.register("n1", 2, 0.0)
    assert told[-1] == closed


def test_leases_have_their_full_time_after_an_outage() -> None:
    store, _ = make()
    incarnation = store.register("n0", 2, 0.0)
    store.rearm(50.0)
    store.expire(59.9)
    assert store.is_alive("n0", incarnation)
