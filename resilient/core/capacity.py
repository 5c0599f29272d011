"""Which nodes train, which stand by, and when it pays to take one in.

A node that has no rank stands by with a worker ready in each of its slots, so that it can take a
lost node's place at once. Growing costs every rank an interruption, so it waits: until the
generation has lived for a while, and twice as long for a node each time that it was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from resilient.core.model import Slot, State, Status, Worker
from resilient.core.ranks import Ranks, from_ranks, iterate

MAX_LOSSES_COUNTED = 7
"""Growth for a node that flaps waits up to 2 ** 7 times as long."""


class Standby(NamedTuple):
    """A node without a rank.

    Attributes:
        some: its slots that have a worker that is ready, in order, with that worker.
        ready: the same; empty while one of them is not ready.
        num_slots: slots that are not excluded.
        held_step: newest step that one of its workers holds; -1: none.
    """

    node: str
    some: tuple[tuple[Slot, Worker], ...]
    ready: tuple[tuple[Slot, Worker], ...]
    num_slots: int
    held_step: int


def slots_of(state: State, node: str) -> Iterator[Slot]:
    """The node's slots that may be given a rank, ascending."""
    for local_rank in range(state.nodes[node]):
        slot = Slot(node, local_rank)
        if slot not in state.excluded:
            yield slot


def usable_nodes(state: State) -> Collection[str]:
    """The nodes that have a slot which is not excluded."""
    bad = {slot.node for slot in state.excluded}
    bare = {node for node in bad & state.nodes.keys() if not any(slots_of(state, node))}
    return state.nodes.keys() - bare if bare else state.nodes.keys()


def standby_nodes(state: State) -> list[Standby]:
    """The nodes without a rank, those that hold the newest state first, then by name."""
    plan = state.plan
    if plan is None:
        return []
    wanted = state.nodes.keys() - plan.nodes
    if not wanted:
        return []
    ready: dict[Slot, Worker] = {}
    held: dict[str, int] = {}
    for worker, known in state.extras.items():
        if worker.node in wanted and known.status is Status.READY and not known.killed:
            if known.slot is not None and (known.slot not in ready or known.holdings):
                ready[known.slot] = worker
            steps = [holding.step for holding in known.holdings]
            held[worker.node] = max([held.get(worker.node, -1), *steps])
    found = []
    for node in sorted(wanted):
        slots = list(slots_of(state, node))
        if slots:
            some = tuple((slot, ready[slot]) for slot in slots if slot in ready)
            full = some if len(some) == len(slots) else ()
            found.append(Standby(node, some, full, len(slots), held.get(node, -1)))
    return sorted(found, key=lambda standby: (-standby.held_step, standby.node))


def num_nodes_left(state: State, dropped: Ranks) -> int:
    """Nodes of the plan that keep a rank when these ranks are dropped."""
    plan = state.plan
    assert plan is not None
    touched = {plan.members[rank].slot.node for rank in iterate(dropped)}
    bare = [node for node in touched if not from_ranks(plan.ranks_on(node)) & ~dropped]
    return plan.num_nodes - len(bare)


def growth_due_s(state: State) -> float | None:
    """When the world may grow by the nodes that stand by ready; None: there is nothing to take."""
    plan, config = state.plan, state.config
    if plan is None or not state.stepped or not config.replace or state.draining is not None:
        return None
    if plan.num_nodes >= config.max_nodes or len(state.nodes) <= plan.num_nodes:
        return None
    losses = [
        state.losses.get(standby.node, 0) for standby in standby_nodes(state) if standby.ready
    ]
    if not losses:
        return None
    return state.began_s + config.grow_delay_s * 2.0 ** min(*losses, MAX_LOSSES_COUNTED)
