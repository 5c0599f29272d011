"""The rendezvous of one process: for a job on one node, and for tests of many agents in one loop.

The one idea: the same rules as a store that is shared (leases, leadership, conditional plans, one
ordered stream), without anything in between. No call ever waits for another process, so none but
`campaign` suspends; a change reaches its watchers within the same turn of the event loop.

Leases end only if the caller gives a clock's time to `expire`: alone in its process a node has
nobody that could take over from it, and a pause of the machine must not cost it its job.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from resilient.core.events import Event
from resilient.core.leader import Record
from resilient.errors import (
    RendezvousClosed,
    RendezvousError,
    RendezvousTimeout,
    StaleGeneration,
)
from resilient.rendezvous import (
    DEFAULT_TIMEOUT_S,
    Change,
    Closed,
    LeaderChanged,
    Lease,
    LeaseLost,
    NodeArrived,
    NodeGone,
    NotLeader,
    Ordered,
    Published,
    Reported,
)


@dataclass
class _Node:
    lease: Lease
    num_slots: int
    ends_s: float | None
    reports: dict[int, Event] = field(default_factory=dict)
    newest: int = 0


class MemoryRendezvous:
    """Shared by all agents of one event loop. Not for use from other threads.

    Args:
        ttl_s: of the leases; None: they have no end.
    """

    def __init__(self, ttl_s: float | None = None) -> None:
        self._ttl_s = ttl_s
        self._now_s = 0.0
        self._nodes: dict[str, _Node] = {}
        self._num_incarnations = 0
        self._leader: Lease | None = None
        self._term = 0
        self._candidates: list[tuple[Lease, asyncio.Future[int]]] = []
        self._published: Published | None = None
        self._orders: list[Ordered] = []  # since the plan before the last one
        self._num_older = 0  # of them, those from before the last plan
        self._closed: Closed | None = None
        self._watchers: list[asyncio.Queue[Change]] = []

    # ------------------------------------------------------------ presence

    async def register(
        self, node: str, num_slots: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Lease:
        """Raises RendezvousError when a node of that name is there and its lease is alive."""
        self._check_open()
        if node in self._nodes:
            raise RendezvousError(f"a node named {node!r} is part of this job already")
        self._num_incarnations += 1
        lease = Lease(node, self._num_incarnations, self._ttl_s)
        self._nodes[node] = _Node(lease, num_slots, self._end_s())
        self._tell(NodeArrived(node, lease.incarnation, num_slots))
        return lease

    async def keep_alive(self, lease: Lease, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._node_of(lease).ends_s = self._end_s()

    async def leave(self, lease: Lease, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if self._is_alive(lease):
            self._remove(lease)

    def expire(self, now_s: float) -> None:
        """Turns the clock that leases are measured by; those that are over end."""
        self._now_s = max(self._now_s, now_s)
        for node in sorted(self._nodes):
            ends_s = self._nodes[node].ends_s
            if ends_s is not None and ends_s <= self._now_s:
                self._remove(self._nodes[node].lease)

    # ------------------------------------------------------------ leadership

    async def campaign(self, lease: Lease, *, timeout_s: float | None = None) -> int:
        self._check_open()
        self._node_of(lease)
        if self._leader == lease:
            self._leader = None  # a new term begins
        elected: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        candidate = (lease, elected)
        self._candidates.append(candidate)
        self._elect()
        try:
            return await asyncio.wait_for(elected, timeout_s)
        except asyncio.TimeoutError:
            raise RendezvousTimeout(f"{lease.node} was not elected in {timeout_s:g} s") from None
        finally:
            if candidate in self._candidates:
                self._candidates.remove(candidate)

    def _elect(self) -> None:
        while self._leader is None and self._candidates and self._closed is None:
            lease, elected = self._candidates.pop(0)
            if elected.done() or not self._is_alive(lease):  # it has given up meanwhile
                continue
            self._term += 1
            self._leader = lease
            elected.set_result(self._term)
            self._tell(LeaderChanged(lease.node, self._term))

    async def resign(
        self, lease: Lease, term: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if self._leader == lease and self._term == term:
            self._leader = None
            self._tell(LeaderChanged(None, term))
            self._elect()

    # ------------------------------------------------------------ reports and plans

    async def report(
        self,
        lease: Lease,
        reports: Sequence[tuple[int, Event]],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._check_open()
        node = self._node_of(lease)
        for number, event in reports:
            if number > node.newest:
                node.newest = number
                node.reports[number] = event
                self._tell(Reported(lease.node, lease.incarnation, number, event))

    async def advise(
        self, lease: Lease, event: Event, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._check_open()
        self._node_of(lease)
        self._tell(Reported(lease.node, lease.incarnation, 0, event))

    async def forget(
        self, lease: Lease, up_to: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        node = self._node_of(lease)
        node.reports = {n: event for n, event in node.reports.items() if n > up_to}

    async def write(
        self, lease: Lease, term: int, record: Record, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if record in (self._published, self._closed) or record in self._orders:
            return
        self._check_leads(lease, term)
        if isinstance(record, Published):
            self._check_follows(record.plan.generation)
            self._published = record
            del self._orders[: self._num_older]
            self._num_older = len(self._orders)
        elif isinstance(record, Ordered):
            self._orders.append(record)
        else:
            self._closed = record
            for _, elected in self._candidates:
                if not elected.done():
                    elected.set_exception(RendezvousClosed(record.reason))
        self._tell(record)

    def _check_follows(self, generation: int) -> None:
        last = self._published.plan.generation if self._published is not None else None
        if last is not None and generation <= last:
            raise StaleGeneration(
                f"generation {generation} cannot follow generation {last}", generation=generation
            )

    # ------------------------------------------------------------ the stream

    async def watch(self) -> AsyncIterator[Change]:
        """Everything there is now, then every change, in order; ends after Closed."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for change in self._now():
            queue.put_nowait(change)
        self._watchers.append(queue)
        try:
            while True:
                change = await queue.get()
                yield change
                if isinstance(change, Closed):
                    return
        finally:
            self._watchers.remove(queue)

    def _now(self) -> list[Change]:
        changes: list[Change] = []
        for node, known in sorted(self._nodes.items()):
            changes.append(NodeArrived(node, known.lease.incarnation, known.num_slots))
        if self._leader is not None:
            changes.append(LeaderChanged(self._leader.node, self._term))
        if self._published is not None:
            changes.append(self._published)
        changes += self._orders
        for node, known in sorted(self._nodes.items()):
            for number, event in sorted(known.reports.items(), key=lambda item: item[0]):
                changes.append(Reported(node, known.lease.incarnation, number, event))
        if self._closed is not None:
            changes.append(self._closed)
        return changes

    def _tell(self, change: Change) -> None:
        for queue in self._watchers:
            queue.put_nowait(change)

    # ------------------------------------------------------------ rules

    def _end_s(self) -> float | None:
        return None if self._ttl_s is None else self._now_s + self._ttl_s

    def _is_alive(self, lease: Lease) -> bool:
        node = self._nodes.get(lease.node)
        return node is not None and node.lease == lease

    def _node_of(self, lease: Lease) -> _Node:
        if not self._is_alive(lease):
            raise LeaseLost(f"the lease of {lease.node} (incarnation {lease.incarnation}) is over")
        return self._nodes[lease.node]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RendezvousClosed(self._closed.reason)

    def _check_leads(self, lease: Lease, term: int) -> None:
        self._check_open()
        self._node_of(lease)
        if self._leader != lease or self._term != term:
            raise NotLeader(f"{lease.node} does not lead in term {term}")

    def _remove(self, lease: Lease) -> None:
        del self._nodes[lease.node]
        self._tell(NodeGone(lease.node, lease.incarnation))
        for other, elected in self._candidates:
            if other == lease and not elected.done():
                elected.set_exception(LeaseLost(f"the lease of {lease.node} is over"))
        if self._leader == lease:
            self._leader = None
            self._tell(LeaderChanged(None, self._term))
            self._elect()
