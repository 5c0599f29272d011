"""Who is in the next generation: the slots of the last plan, filled with living workers.

Pure functions over the coordinator's state. Ranks are the last plan's until the members are made;
whoever stays keeps its rank, and the very object that says so, so that a plan for 80,000 ranks of
which eight changed costs eight.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resilient.core.capacity import Standby, num_nodes_left, standby_nodes
from resilient.core.model import (
    Group,
    Member,
    Phase,
    Plan,
    Slot,
    State,
    Status,
    Worker,
    WorkerState,
)
from resilient.core.ranks import Ranks, bit, count, from_ranks, full, has, iterate


@dataclass(frozen=True)
class Membership:
    """Who would be in the next generation, as far as it is known now; ranks are the last plan's.

    Attributes:
        filled: ranks whose slot has a ready worker: the last one, or the substitute.
        substitutes: by rank, the workers that take the place of dead ones.
        waiting: ranks whose slot has no ready worker yet.
        to_start: of their slots, those for which not even a starting worker is there; ascending.
        dropped: ranks whose slot the world loses.
        moves: new rank -> last rank, of those that fill a hole; empty while any is waited for.
        slots: by rank, the slots of nodes that come in; they take the ranks of dropped slots, then
            ranks beyond the last plan's. Their workers are among the substitutes.
        num_nodes: that have a rank.
        coming: (nodes, slots) that stand by and could come in, were they ready.
        holder_comes: one of these holds a newer step than anybody else, and is waited for.
    """

    filled: Ranks = field(repr=False)
    substitutes: Mapping[int, Worker]
    waiting: Ranks = field(repr=False)
    to_start: tuple[Slot, ...]
    dropped: Ranks = field(repr=False)
    moves: Mapping[int, int]
    slots: Mapping[int, Slot] = field(default_factory=dict)
    num_nodes: int = 1
    coming: tuple[int, int] = (0, 0)
    holder_comes: bool = False

    @property
    def world_size(self) -> int:
        """Of the next generation, if everybody comes who is waited for."""
        return count(self.filled) + count(self.waiting)


class _Draft:
    """A membership in the making, by the last plan's ranks; see Membership for the names."""

    def __init__(self, state: State, *, give_up_waiting: bool, replaces: bool, without: Ranks):
        assert state.plan is not None
        plan, roster = state.plan, state.roster
        self.state, self.last = state, plan
        self.barred = _excluded_ranks(state.excluded, plan) & ~roster.lost
        self.dropped = roster.lost | self.barred | without
        well = roster.alive & ~roster.killed & ~self.dropped
        self.filled = well & roster.waiting
        self.waiting = well & ~self.filled
        self.substitutes: dict[int, Worker] = {}
        self.slots: dict[int, Slot] = {}
        self.to_start: list[Slot] = []
        holes = full(plan.world_size) & ~self.dropped & ~well
        if replaces:
            self._fill(holes)
        else:
            self.dropped |= holes
        if give_up_waiting:
            self.dropped, self.waiting, self.to_start = self.dropped | self.waiting, 0, []
        self.num_nodes = num_nodes_left(state, self.dropped)

    def _fill(self, holes: Ranks) -> None:
        """On the same node: a worker that is ready, else one that is starting, else a new one."""
        slots = [(rank, self.last.members[rank].slot) for rank in iterate(holes)]
        extra = _extra_on(self.state, {slot.node for _, slot in slots})
        late = []
        for rank, slot in slots:
            substitute = _take(extra, slot, ready=True)
            if substitute is not None:
                self.substitutes[rank] = substitute
                continue
            late.append(rank)
            if _take(extra, slot, ready=False) is None:
                self.to_start.append(slot)
        self.filled |= from_ranks(self.substitutes)
        self.waiting |= from_ranks(late)

    def is_few(self, nodes: Sequence[Standby] = ()) -> bool:
        """Whether they are fewer than the minimum, with these nodes, too."""
        config = self.state.config
        size = count(self.filled | self.waiting) + sum(len(node.ready) for node in nodes)
        num_nodes = self.num_nodes + len(nodes)
        return size < max(config.min_world_size, 1) or num_nodes < config.min_nodes

    def newest_held(self) -> int:
        """The newest step that one of these ranks would bring along; -1: none holds any."""
        stay = self.filled & ~from_ranks(self.substitutes)
        held = [what for ranks, what in self.state.roster.holdings if ranks & stay]
        held += [self.state.extras[worker].holdings for worker in self.substitutes.values()]
        return max((holding.step for what in held for holding in what), default=-1)

    def keep_last_holder(self, nodes: Sequence[Standby]) -> None:
        """Where nobody else holds any state, an excluded slot keeps its rank until others do.

        nodes: that come in.
        """
        if self.is_few(nodes):
            return
        waiting = self.barred & self.state.roster.waiting & ~self.state.roster.killed
        holders = [held & waiting for held, _ in self.state.roster.holdings if held & waiting]
        first = min((held & -held for held in holders), default=0)
        dropped = self.dropped & ~first
        num_nodes = num_nodes_left(self.state, dropped)
        if num_nodes + len(nodes) <= self.state.config.max_nodes:
            self.filled, self.dropped, self.num_nodes = self.filled | first, dropped, num_nodes

    def come_in(self, nodes: Sequence[Standby]) -> None:
        """Nodes that stand by get the ranks of dropped slots, then ranks beyond the last plan's."""
        ranks = itertools.chain(iterate(self.dropped), itertools.count(self.last.world_size))
        places = (place for node in nodes for place in node.ready)
        for rank, (slot, worker) in zip(ranks, places, strict=False):
            self.slots[rank], self.substitutes[rank] = slot, worker
        self.filled |= from_ranks(self.slots)
        self.dropped &= ~self.filled
        self.num_nodes += len(nodes)


def choose_members(state: State, *, give_up_waiting: bool = False) -> Membership:
    """Fills the slots of the last plan with living workers.

    A survivor keeps its slot and, unless the world shrinks below it, its rank. A dead one's slot
    and rank go to a ready spare of the same node, else to a worker that is starting. Up to the
    largest number of nodes, those that stand by ready come in: first in place of lost ones. When
    the world shrinks, the highest ranks fill the holes.

    Args:
        give_up_waiting: drop the slots that have no ready worker (the rendezvous timed out).
    """
    config = state.config

    def draft(replaces: bool, without: Ranks = 0) -> _Draft:
        return _Draft(state, give_up_waiting=give_up_waiting, replaces=replaces, without=without)

    replaces = config.replace or state.phase is Phase.FORMING
    chosen = draft(replaces)
    if chosen.is_few() and not replaces and state.may_grow:
        replaces = True  # below the minimum everybody is welcome
        chosen = draft(replaces)
    # Looking for them takes a look at every node: not for each of 80,000 workers that come up.
    has_room = chosen.num_nodes < config.max_nodes
    wanted = has_room or any(known.holdings for known in state.extras.values())
    standby = standby_nodes(state) if replaces and wanted else []
    others = max(chosen.newest_held(), state.persisted_step or -1)
    is_best = bool(standby) and standby[0].held_step > others
    if is_best and give_up_waiting:  # without its slots that are not ready
        standby[0] = standby[0]._replace(ready=standby[0].some)
    if is_best and standby[0].ready and chosen.num_nodes >= config.max_nodes:
        # The last copy must not stand by: a node that holds an older one makes room.
        members = chosen.last.members
        node = max(members[rank].slot.node for rank in iterate(chosen.filled | chosen.waiting))
        chosen = draft(replaces, from_ranks(chosen.last.ranks_on(node)))
    room = max(config.max_nodes - chosen.num_nodes, 0)
    ready = [one for one in standby if one.ready][:room]
    late = [one for one in standby if not one.ready][: room - len(ready)]
    if max([chosen.newest_held(), *(one.held_step for one in ready)]) < 0:
        chosen.keep_last_holder(ready)
    chosen.come_in(ready)
    return Membership(
        chosen.filled,
        chosen.substitutes,
        chosen.waiting,
        tuple(sorted(chosen.to_start)),
        chosen.dropped,
        {} if chosen.waiting else _dense(chosen.filled),
        chosen.slots,
        chosen.num_nodes,
        (len(late), sum(one.num_slots for one in late)),
        is_best and not standby[0].ready,
    )


def _excluded_ranks(excluded: frozenset[Slot], plan: Plan) -> Ranks:
    nodes = {slot.node for slot in excluded}
    ranks = [rank for node in nodes for rank in plan.ranks_on(node)]
    return from_ranks([rank for rank in ranks if plan.members[rank].slot in excluded])


def _extra_on(state: State, nodes: set[str]) -> dict[Worker, WorkerState]:
    """The living extras of these nodes, ascending."""
    if not nodes:
        return {}
    known = state.extras.items()
    return dict(sorted((w, s) for w, s in known if w.node in nodes and not s.killed))


def _take(extra: dict[Worker, WorkerState], slot: Slot, *, ready: bool) -> Worker | None:
    """Takes the best worker for the slot out of `extra`: made for it, else a spare of its node."""
    best = None
    for worker, known in extra.items():
        if (known.status is Status.READY) is not ready or worker.node != slot.node:
            continue
        if known.slot == slot:
            best = worker
            break
        if best is None and known.slot is None:
            best = worker
    if best is not None:
        del extra[best]
    return best


def _dense(filled: Ranks) -> dict[int, int]:
    """Ranks 0..n-1: whoever is below n keeps its rank, the highest fill the holes, new -> old."""
    size = count(filled)
    holes = full(size) & ~filled
    beyond = [size + rank for rank in iterate(filled >> size)]
    return dict(zip(iterate(holes), reversed(beyond), strict=True))


def members_of(state: State, chosen: Membership) -> tuple[Member, ...]:
    """The members of the next plan, once nobody is waited for; who stays, stays the same object."""
    assert state.plan is not None and not chosen.waiting
    last = state.plan.members
    size = chosen.world_size
    members = list(last[:size])
    members += last[:1] * (size - len(members))  # each of these places is filled below
    for new, old in (*((rank, rank) for rank in chosen.substitutes), *chosen.moves.items()):
        if new < size:
            slot = chosen.slots[old] if old in chosen.slots else last[old].slot
            worker = chosen.substitutes[old] if old in chosen.substitutes else last[old].worker
            members[new] = Member(new, slot, worker)
    return tuple(members)


def held_by(state: State, chosen: Membership) -> list[Group]:
    """What the ranks of the next generation hold; as long as some are waited for, by last rank."""
    stay = chosen.filled & ~from_ranks(chosen.substitutes)
    groups = []
    for ranks, what in state.roster.holdings:
        held = ranks & stay
        moved = from_ranks([new for new, old in chosen.moves.items() if has(held, old)])
        if not chosen.waiting:
            held &= full(chosen.world_size)
        groups.append((held | moved, what))
    new_rank = {old: new for new, old in chosen.moves.items()}
    for rank, worker in chosen.substitutes.items():
        groups.append((bit(new_rank.get(rank, rank)), state.extras[worker].holdings))
    return [(ranks, what) for ranks, what in groups if ranks and what]
