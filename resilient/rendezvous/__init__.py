"""Where agents meet: the interface that every rendezvous has, and its errors.

The one idea: a rendezvous is a small store with leases, not a protocol. Agents register, one of
them leads, all of them report, the leader publishes plans, everybody watches one ordered stream of
changes. A plan is a transaction that also compares who leads, so that a deposed leader writes
nothing; and its generation must be the successor of the last, so that there is one plan a
generation. Who does what when is decided elsewhere (resilient/core: node.py and coordinator.py).

Every call takes a deadline. Errors by who must act:

    RendezvousTimeout   no answer in time; for a write the outcome is unknown: look at the stream
    LeaseLost           register again, as a new incarnation
    NotLeader           somebody else leads, or nobody: stop deciding
    StaleGeneration     there is a plan of that generation already: look at the stream
    RendezvousClosed    the job has ended
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from resilient.core.leader import Record
from resilient.errors import RendezvousError

__all__ = [
    "Change",
    "Closed",
    "LeaderChanged",
    "Lease",
    "LeaseLost",
    "NodeArrived",
    "NodeGone",
    "NotLeader",
    "Ordered",
    "Published",
    "Rendezvous",
    "Reported",
]

DEFAULT_TIMEOUT_S = 5.0


class LeaseLost(RendezvousError):
    """The lease has ended: the others may act as if this node were gone."""


class NotLeader(RendezvousError):
    """Refused: only the leader may write that, and this node is not it (any more)."""


@dataclass(frozen=True)
class Lease:
    """One node's presence.

    Attributes:
        incarnation: counts the rebirths of all nodes; a later one is always greater.
        ttl_s: how long it lives after the last keep-alive was sent; None: for ever, since nobody
            could take over from this node.
    """

    node: str
    incarnation: int
    ttl_s: float | None


class Rendezvous(Protocol):
    """What memory.py (one node) has, and what every other one will have."""

    async def register(
        self, node: str, num_slots: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Lease:
        """Makes the node known. Raises RendezvousClosed, RendezvousTimeout, RendezvousError."""

    async def keep_alive(self, lease: Lease, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Renews the lease. Raises LeaseLost, RendezvousTimeout."""

    async def leave(self, lease: Lease, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Gives the lease, and the leadership if it has it, back at once."""

    async def campaign(self, lease: Lease, *, timeout_s: float | None = None) -> int:
        """Waits until this node leads; timeout_s None: as long as it takes.

        Returns:
            The term: greater than that of every leader before. A node that leads already begins a
            new one: a term is led once, from its beginning.
        Raises:
            LeaseLost, RendezvousClosed, RendezvousTimeout.
        """

    async def resign(
        self, lease: Lease, term: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Gives the leadership of that term back; without it, nothing."""

    async def report(
        self,
        lease: Lease,
        reports: Sequence[tuple[int, Event]],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Stores reports, (number, event) ascending, in one transaction. Numbers up to the newest
        that was ever stored are left out: the same again changes nothing.

        Raises:
            LeaseLost, RendezvousClosed, RendezvousTimeout.
        """

    async def advise(
        self, lease: Lease, event: Event, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Passes an event on, as number 0, and keeps it nowhere. Raises as `report`."""

    async def forget(
        self, lease: Lease, up_to: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Removes this node's reports up to that number. Raises LeaseLost, RendezvousTimeout."""

    async def write(
        self, lease: Lease, term: int, record: Record, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """One transaction, if this node still leads in that term: a plan, an order, or the end.

        The very same record again changes nothing. A plan removes the orders from before the last
        one.

        Raises:
            NotLeader, StaleGeneration (a plan whose generation does not follow), LeaseLost,
            RendezvousClosed, RendezvousTimeout.
        """

    def watch(self) -> AsyncIterator[Change]:
        """Everything there is now, then every change, in order.

        First the nodes, then the leader, the last plan, orders since the plan before it, reports.

        Each watcher sees the same order; the stream ends after Closed.
        """
