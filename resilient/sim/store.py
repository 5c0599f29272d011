"""The rendezvous store of a simulated cluster: leases, elections, conditional writes, one stream.

The one idea: it is a single machine in simulated time, as a store with a quorum is to those who
talk to it. Each method is one transaction at the time of `now_s`; what may get lost is on the way
to it and back (network.py). An outage answers nobody, and no lease ends during it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from resilient.core.events import Event

Record = Published | Ordered | Closed


class Refused(Exception):
    """The store's answer is no."""


class NameTaken(Refused):
    pass


class LeaseLost(Refused):
    pass


class NotLeader(Refused):
    pass


class Stale(Refused):
    pass


class JobClosed(Refused):
    pass


@dataclass
class Lease:
    node: str
    incarnation: int
    num_slots: int
    ends_s: float
    newest: int = 0
    reports: dict[int, Event] = field(default_factory=dict)


class Store:
    """Args:
    ttl_s: of the leases.
    told: called after each change of the stream has been appended to `log`.
    """

    def __init__(self, ttl_s: float, told: Callable[[Change], None]) -> None:
        self.ttl_s = ttl_s
        self._told = told
        self.leases: dict[str, Lease] = {}
        self.log: list[Change] = []
        self.published: Published | None = None
        self.closed: Closed | None = None
        self.term = 0
        self._leader: Lease | None = None
        self._candidates: list[tuple[Lease, Callable[[int], None]]] = []
        self._orders: list[tuple[int, Ordered]] = []
        self._written: set[tuple[int, int]] = set()
        self._num_published = 0
        self._num_incarnations = 0

    @property
    def leader(self) -> str | None:
        return self._leader.node if self._leader is not None else None

    # ------------------------------------------------------------ presence

    def register(self, node: str, num_slots: int, now_s: float) -> int:
        """Returns the incarnation."""
        self._check_open()
        if node in self.leases:
            raise NameTaken(node)
        self._num_incarnations += 1
        lease = Lease(node, self._num_incarnations, num_slots, now_s + self.ttl_s)
        self.leases[node] = lease
        self._tell(NodeArrived(node, lease.incarnation, num_slots))
        return lease.incarnation

    def keep_alive(self, node: str, incarnation: int, now_s: float) -> None:
        self._lease(node, incarnation).ends_s = now_s + self.ttl_s

    def leave(self, node: str, incarnation: int, *, certain: bool) -> None:
        """Gives the lease back; certain: nothing of the node runs any more."""
        if self.is_alive(node, incarnation):
            self._remove(self.leases[node], certain=certain)

    def expire(self, now_s: float) -> None:
        """Ends the leases that are over."""
        for node in sorted(self.leases):
            lease = self.leases.get(node)
            if lease is not None and lease.ends_s <= now_s:
                self._remove(lease, certain=False)

    def rearm(self, now_s: float) -> None:
        """After an outage every lease has its full time again."""
        for lease in self.leases.values():
            lease.ends_s = now_s + self.ttl_s

    def is_alive(self, node: str, incarnation: int | None) -> bool:
        lease = self.leases.get(node)
        return lease is not None and lease.incarnation == incarnation

    # ------------------------------------------------------------ leadership

    def campaign(self, node: str, incarnation: int, elected: Callable[[int], None]) -> int | None:
        """The new term, if the node leads now; else None, and `elected(term)` once it does.

        Whoever led already leads in a term of its own from here on: what it did in the last one
        it may have forgotten.
        """
        self._check_open()
        lease = self._lease(node, incarnation)
        self._candidates = [c for c in self._candidates if c[0] is not lease]
        if self._leader is None or self._leader is lease:
            self._elect(lease)
            return self.term
        self._candidates.append((lease, elected))
        return None

    def resign(self, node: str, incarnation: int, term: int) -> None:
        """Gives back the leadership of that term, if it still has it."""
        lease = self._lease(node, incarnation)
        if self._leader is lease and self.term == term:
            self._vacate()

    def _elect(self, lease: Lease) -> None:
        self.term += 1
        self._leader = lease
        self._tell(LeaderChanged(lease.node, self.term))

    def _elect_next(self) -> None:
        if self._leader is None and self._candidates and self.closed is None:
            lease, elected = self._candidates.pop(0)
            self._elect(lease)
            elected(self.term)

    # ------------------------------------------------------------ reports and records

    def report(self, node: str, incarnation: int, reports: Sequence[tuple[int, Event]]) -> None:
        """One transaction: those that are new, in order."""
        self._check_open()
        lease = self._lease(node, incarnation)
        for number, event in reports:
            if number > lease.newest:
                lease.newest = number
                lease.reports[number] = event
                self._tell(Reported(node, incarnation, number, event))

    def advise(self, node: str, incarnation: int, event: Event) -> None:
        """Passes it on and keeps nothing."""
        self._check_open()
        self._lease(node, incarnation)
        self._tell(Reported(node, incarnation, 0, event))

    def forget(self, node: str, incarnation: int, up_to: int) -> None:
        reports = self._lease(node, incarnation).reports
        for number in [number for number in reports if number <= up_to]:
            del reports[number]

    def write(self, node: str, incarnation: int, term: int, record: Record) -> None:
        """One transaction: compares that this node leads in this term, and appends the record."""
        if self.closed is not None and record == self.closed:
            return
        self._check_open()
        lease = self._lease(node, incarnation)
        if self._leader is not lease or self.term != term:
            raise NotLeader(f"{node} does not lead in term {term}")
        match record:
            case Published():
                self._publish(record)
            case Ordered():
                self._order(record)
            case Closed():
                self.closed = record
                self._tell(record)

    def _publish(self, record: Published) -> None:
        last = self.published
        if last is not None and record.plan.generation <= last.plan.generation:
            if record.plan == last.plan:
                return  # a retry: it had been written
            raise Stale(f"generation {record.plan.generation} comes too late")
        self._orders = [(at, order) for at, order in self._orders if at >= self._num_published]
        self._num_published += 1
        self.published = record
        self._tell(record)

    def _order(self, record: Ordered) -> None:
        key = (record.term, record.number)
        if key not in self._written:
            self._written.add(key)
            self._orders.append((self._num_published, record))
            self._tell(record)

    # ------------------------------------------------------------ the stream

    def snapshot(self) -> list[Change]:
        """What a new watcher is told first; it goes on with `log` from its present end."""
        changes: list[Change] = []
        for node, lease in sorted(self.leases.items()):
            changes.append(NodeArrived(node, lease.incarnation, lease.num_slots))
        if self._leader is not None:
            changes.append(LeaderChanged(self._leader.node, self.term))
        if self.published is not None:
            changes.append(self.published)
        changes += [order for _, order in self._orders]
        for node, lease in sorted(self.leases.items()):
            for number in sorted(lease.reports):
                changes.append(Reported(node, lease.incarnation, number, lease.reports[number]))
        if self.closed is not None:
            changes.append(self.closed)
        return changes

    # ------------------------------------------------------------ rules

    def _lease(self, node: str, incarnation: int) -> Lease:
        if not self.is_alive(node, incarnation):
            raise LeaseLost(f"the lease of {node} (incarnation {incarnation}) is over")
        return self.leases[node]

    def _check_open(self) -> None:
        if self.closed is not None:
            raise JobClosed(self.closed.reason)

    def _tell(self, change: Change) -> None:
        self.log.append(change)
        self._told(change)

    def _remove(self, lease: Lease, *, certain: bool) -> None:
        del self.leases[lease.node]
        self._candidates = [c for c in self._candidates if c[0] is not lease]
        self._tell(NodeGone(lease.node, lease.incarnation, certain))
        if self._leader is lease:
            self._vacate()

    def _vacate(self) -> None:
        self._leader = None
        self._tell(LeaderChanged(None, self.term))
        self._elect_next()
