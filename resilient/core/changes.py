"""What a rendezvous tells: one ordered stream of changes, the same for every agent.

The order is what everything rests on. A leader's writes are transactions that compare who leads, so
all of a leader's orders come before the `LeaderChanged` that ends its term: an agent that has seen
that change has seen every order of the old leader, and what it tells the new one is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resilient.core.events import Effect, Event
from resilient.core.model import Outcome, Plan, State


@dataclass(frozen=True)
class NodeArrived:
    node: str
    incarnation: int
    num_slots: int


@dataclass(frozen=True)
class NodeGone:
    """It has left, or its lease has ended. certain: its processes are known to be gone."""

    node: str
    incarnation: int
    certain: bool = False


@dataclass(frozen=True)
class LeaderChanged:
    """node None: nobody leads now."""

    node: str | None
    term: int


@dataclass(frozen=True)
class Reported:
    """number 0: advice, not kept."""

    node: str
    incarnation: int
    number: int
    event: Event


@dataclass(frozen=True)
class Published:
    """A plan, with all that a later leader has to know.

    Attributes:
        incarnations: of the nodes that have a rank in it. An agent that came back under the same
            name does not enter what was meant for its former life.
        answered: per node, its incarnation and the number of the newest report that the plan takes
            into account.
        archive: the coordinator's state without what nodes tell anew (see core/takeover.py); None
            where nobody could take over.
    """

    plan: Plan
    answered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    incarnations: Mapping[str, int] = field(default_factory=dict)
    archive: State | None = None


@dataclass(frozen=True)
class Ordered:
    """The leader's effects for the agents, each of which carries out those of its own workers.

    Attributes:
        number: counts up within the term. An order has an effect once: (term, number) only grows.
        incarnations: of the nodes that it concerns. An agent that came back under the same name
            reads orders to its former life, and they are none of its.
        decorated: the script is. Told once, before the first plan, for leaders to come.
    """

    term: int
    number: int
    effects: tuple[Effect, ...]
    incarnations: Mapping[str, int] = field(default_factory=dict)
    decorated: bool = False


@dataclass(frozen=True)
class Closed:
    """The job has ended; the stream ends with it."""

    reason: str
    outcome: Outcome | None = None


Change = NodeArrived | NodeGone | LeaderChanged | Reported | Published | Ordered | Closed
