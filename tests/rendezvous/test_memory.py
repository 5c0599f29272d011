"""The rules of a rendezvous, tried on the one in memory. Another one must pass the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from resilient import rendezvous as rdzv
from resilient.core import events as ev
from resilient.core.model import Cut, CutKind, Plan, Worker
from resilient.errors import (
    RendezvousClosed,
    RendezvousError,
    RendezvousTimeout,
    StaleGeneration,
)
from resilient.rendezvous.memory import MemoryRendezvous

EXIT = ev.WorkerExited(Worker("n0", 1), -9)
READY = ev.WorkerReady(Worker("n0", 1))


def plan(generation: int) -> Plan:
    return Plan(generation, (), ("h", 1), Cut(CutKind.INITIAL, 0))


def published(generation: int) -> rdzv.Published:
    return rdzv.Published(plan(generation))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


async def take(stream: Any, count: int) -> list[rdzv.Change]:
    return [await asyncio.wait_for(anext(stream), 5) for _ in range(count)]


def test_one_leads_and_another_follows_when_it_leaves() -> None:
    async def test() -> None:
        meeting: rdzv.Rendezvous = MemoryRendezvous()
        first = await meeting.register("n0", 2)
        second = await meeting.register("n1", 2)
        assert await meeting.campaign(first) == 1
        assert await meeting.campaign(first) == 2  # a term is led once, from its beginning
        waiting = asyncio.ensure_future(meeting.campaign(second))
        await asyncio.sleep(0)
        assert not waiting.done()
        await meeting.leave(first)
        assert await waiting == 3

    run(test())


def test_who_resigns_makes_room() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        first = await meeting.register("n0", 2)
        second = await meeting.register("n1", 2)
        term = await meeting.campaign(first)
        waiting = asyncio.ensure_future(meeting.campaign(second))
        await asyncio.sleep(0)
        await meeting.resign(first, term + 1)  # of another term: of no effect
        await meeting.resign(second, term)
        assert not waiting.done()
        await meeting.resign(first, term)
        assert await waiting == term + 1
        with pytest.raises(rdzv.NotLeader):
            await meeting.write(first, term, published(0))
        await meeting.leave(first)  # still there, only not leading

    run(test())


def test_orders_are_kept_since_the_plan_before_the_last() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        lease = await meeting.register("n0", 2)
        term = await meeting.campaign(lease)
        orders = [rdzv.Ordered(term, number, ()) for number in range(4)]
        await meeting.write(lease, term, orders[0])
        await meeting.write(lease, term, published(0))
        await meeting.write(lease, term, orders[1])
        await meeting.write(lease, term, orders[1])  # repeated: changes nothing
        await meeting.write(lease, term, published(1))
        await meeting.write(lease, term, published(1))
        await meeting.write(lease, term, orders[2])
        seen = await take(meeting.watch(), 5)
        assert seen[2:] == [published(1), orders[1], orders[2]]

    run(test())


def test_reports_that_come_late_again_change_nothing() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        lease = await meeting.register("n0", 2)
        await meeting.report(lease, [(1, READY), (2, EXIT)])
        await meeting.forget(lease, 2)
        await meeting.report(lease, [(1, READY)])
        await meeting.report(lease, [(2, EXIT), (3, READY)])
        seen = await take(meeting.watch(), 2)
        assert seen[1] == rdzv.Reported("n0", 1, 3, READY)

    run(test())

    run(test())


def test_a_campaign_has_a_deadline_and_leaves_nothing_behind() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        first = await meeting.register("n0", 2)
        second = await meeting.register("n1", 2)
        third = await meeting.register("n2", 2)
        await meeting.campaign(first)
        with pytest.raises(RendezvousTimeout):
            await meeting.campaign(second, timeout_s=0.01)
        waiting = asyncio.ensure_future(meeting.campaign(third))
        await asyncio.sleep(0)
        await meeting.leave(first)
        assert await waiting == 2  # not given to the one that had stopped waiting

    run(test())


def test_only_the_leader_of_this_term_publishes() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous(ttl_s=10.0)
        first = await meeting.register("n0", 2)
        second = await meeting.register("n1", 2)
        term = await meeting.campaign(first)
        await meeting.write(first, term, published(0))
        with pytest.raises(rdzv.NotLeader):
            await meeting.write(second, term, published(1))
        waiting = asyncio.ensure_future(meeting.campaign(second))
        await asyncio.sleep(0)
        meeting.expire(9.0)
        await meeting.keep_alive(second)
        meeting.expire(10.0)  # the first one's lease ends, not the second one's
        assert await waiting == term + 1
        with pytest.raises(rdzv.LeaseLost):
            await meeting.write(first, term, published(1))
        with pytest.raises(rdzv.NotLeader):
            await meeting.write(second, term, published(1))
        await meeting.write(second, term + 1, published(1))

    run(test())


def test_there_is_one_plan_a_generation() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        lease = await meeting.register("n0", 2)
        term = await meeting.campaign(lease)
        await meeting.write(lease, term, published(3))
        for generation in (2, 3):
            other = rdzv.Published(plan(generation), {"n0": 1})
            with pytest.raises(StaleGeneration):
                await meeting.write(lease, term, other)

    run(test())


def test_watchers_see_one_order_and_a_late_one_sees_what_is_there() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        early = meeting.watch()
        pending = asyncio.ensure_future(anext(early))
        await asyncio.sleep(0)
        lease = await meeting.register("n0", 2)
        term = await meeting.campaign(lease)
        await meeting.report(lease, [(1, READY)])
        await meeting.write(lease, term, rdzv.Published(plan(0), {"n0": 1}))
        await meeting.forget(lease, 1)
        await meeting.report(lease, [(2, EXIT)])
        await meeting.report(lease, [(2, EXIT)])  # repeated: changes nothing
        await meeting.advise(lease, ev.PaceMeasured(1.0))
        expected = [
            rdzv.NodeArrived("n0", 1, 2),
            rdzv.LeaderChanged("n0", 1),
            rdzv.Reported("n0", 1, 1, READY),
            rdzv.Published(plan(0), {"n0": 1}),
            rdzv.Reported("n0", 1, 2, EXIT),
            rdzv.Reported("n0", 1, 0, ev.PaceMeasured(1.0)),
        ]
        assert [await pending, *await take(early, 5)] == expected
        late = meeting.watch()  # what a new leader begins with
        assert await take(late, 4) == [expected[0], expected[1], expected[3], expected[4]]
        await meeting.write(lease, term, rdzv.Closed("done"))
        assert [c async for c in early] == [c async for c in late] == [rdzv.Closed("done")]
        assert meeting._watchers == []

    run(test())


def test_after_the_end_nobody_joins_and_nobody_waits() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous()
        lease = await meeting.register("n0", 2)
        other = await meeting.register("n1", 2)
        term = await meeting.campaign(lease)
        waiting = asyncio.ensure_future(meeting.campaign(other))
        await asyncio.sleep(0)
        await meeting.write(lease, term, rdzv.Closed("done"))
        with pytest.raises(RendezvousClosed):
            await waiting
        for call in (
            meeting.register("n2", 1),
            meeting.report(lease, [(1, EXIT)]),
            meeting.write(lease, term, published(0)),
            meeting.campaign(other),
        ):
            with pytest.raises(RendezvousClosed):
                await call

    run(test())


def test_a_name_is_used_once_and_a_node_that_comes_back_is_a_new_incarnation() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous(ttl_s=10.0)
        first = await meeting.register("n0", 2)
        with pytest.raises(RendezvousError):
            await meeting.register("n0", 2)
        meeting.expire(10.0)
        again = await meeting.register("n0", 2)
        assert again.incarnation > first.incarnation
        for call in (
            meeting.report(first, [(1, EXIT)]),
            meeting.keep_alive(first),
            meeting.forget(first, 1),
        ):
            with pytest.raises(rdzv.LeaseLost):
                await call
        await meeting.leave(first)  # of no effect on the new one
        await meeting.keep_alive(again)

    run(test())


def test_a_candidate_whose_lease_ends_is_told() -> None:
    async def test() -> None:
        meeting = MemoryRendezvous(ttl_s=10.0)
        first = await meeting.register("n0", 2)
        second = await meeting.register("n1", 2)
        await meeting.campaign(first)
        waiting = asyncio.ensure_future(meeting.campaign(second))
        await asyncio.sleep(0)
        meeting.expire(5.0)
        await meeting.keep_alive(first)
        meeting.expire(10.0)
        with pytest.raises(rdzv.LeaseLost):
            await waiting

    run(test())
