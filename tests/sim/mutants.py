"""Cores that are broken on purpose: what looks for broken promises must find each of them.

    python -m tests.sim.mutants [NAME...]      who finds each, and after how many seeds: the table
                                               in docs/simulator.md

The one idea: a mistake is a function that stands in for one of the core's, and is given the right
one as its first argument. Its name is the mutation's, its docstring says what was programmed wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from resilient.core import (
    capacity,
    coordinator,
    leader,
    membership,
    node,
    policy,
    takeover,
    transitions,
)
from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core.events import Event
from resilient.core.membership import Membership
from resilient.core.model import (
    Cut,
    Group,
    Holding,
    Member,
    Outcome,
    Phase,
    Slot,
    State,
    Status,
    Worker,
    WorkerState,
)
from resilient.core.move import Move
from resilient.core.policy import Verdict
from resilient.core.ranks import Ranks, iterate
from resilient.sim.run import run

MAX_SEEDS = 500
NUM_NODES = (1, 2, 3, 2, 4, 3, 2, 8)
"""Of the seeds in turn: small clusters are fast, and have the worst of it."""

SEVERAL = (4, 5, 6)
"""For mistakes that need several nodes to do harm."""


# ---------------------------------------------------------------- what a mutation is

Place = tuple[Any, Any]
"""(module or class, name), or (table, key)."""


@dataclass(frozen=True)
class Mutant:
    """One mistake. nodes: of the seeds in turn. slow: it takes many of them to find it."""

    name: str
    mistake: str
    patches: tuple[tuple[Any, Any, Callable[..., Any]], ...]
    nodes: tuple[int, ...]
    slow: bool

    def num_nodes(self, seed: int) -> int:
        return self.nodes[seed % len(self.nodes)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, key, broken in self.patches:
                if isinstance(where, dict):
                    stack.enter_context(patch.dict(where, {key: broken}))
                else:
                    stack.enter_context(patch.object(where, key, broken))
            yield


MUTANTS: dict[str, Mutant] = {}


def mistake(
    *places: Place, nodes: tuple[int, ...] = NUM_NODES, slow: bool = False
) -> Callable[[Callable[..., Any]], Mutant]:
    def registered(broken: Callable[..., Any]) -> Mutant:
        patches = tuple((where, key, _stands_in(broken, where, key)) for where, key in places)
        name = broken.__name__.replace("_", " ")
        assert broken.__doc__ is not None
        told = " ".join(broken.__doc__.split())
        mutant = MUTANTS[name] = Mutant(name, told, patches, nodes, slow)
        return mutant

    return registered


def _stands_in(broken: Callable[..., Any], where: Any, key: Any) -> Callable[..., Any]:
    right = where[key] if isinstance(where, dict) else getattr(where, key)

    def called(*arguments: Any, **keywords: Any) -> Any:
        return broken(right, *arguments, **keywords)

    return called


class Found(NamedTuple):
    """Who has noticed. num_seeds: runs that it took, this one too."""

    checker: str
    text: str
    seed: int
    num_seeds: int
    cpu_s: float


@cache
def find(name: str, max_seeds: int = MAX_SEEDS) -> Found | None:
    """The first seed that notices. One at which the unbroken core fails as well proves nothing."""
    began_s, mutant = time.process_time(), MUTANTS[name]
    for seed in range(max_seeds):
        with mutant.applied():
            seen = run(seed, num_nodes=mutant.num_nodes(seed)).violation
        if seen is None or run(seed, num_nodes=mutant.num_nodes(seed)).violation is not None:
            continue
        last_frame = seen.text.rpartition('  File "')[2].partition('"')[0]
        assert last_frame != __file__, f"the stand-in is wrong, not the core:\n{seen.text}"
        return Found(seen.checker, seen.text, seed, seed + 1, time.process_time() - began_s)
    return None


def table(names: Sequence[str]) -> str:
    lines = ["| mutation | what was programmed wrong | found by | seeds | CPU s |"]
    lines += ["|---|---|---|---|---|"]
    for name in names:
        found = find(name)
        how = "nobody | |"
        if found is not None:
            how = f"`{found.checker}` | {found.num_seeds} | {found.cpu_s:.1f}"
        lines.append(f"| {name} | {MUTANTS[name].mistake} | {how} |")
    return "\n".join(lines)


def resume_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the core for the rest of a test: one fault is enough for somebody to notice."""
    for where, key, broken in resumes_one_step_too_early.patches:
        monkeypatch.setattr(where, key, broken)


# ---------------------------------------------------------------- leases and fences

_NodeResult = tuple[node.NodeState, list[node.NodeEffect], str]
_OfNode = Callable[..., _NodeResult]


def _without(result: _NodeResult, kind: type[Any]) -> _NodeResult:
    state, effects, reason = result
    return state, [effect for effect in effects if not isinstance(effect, kind)], reason


@mistake((node, "_fence"))
def never_fences_itself(
    right: _OfNode, state: node.NodeState, generation: int, reason: str, *_: Any
) -> _NodeResult:
    """A node whose lease ends goes on, whoever has taken its ranks."""
    return state, [], reason


@mistake((node, "_is_ending"))
def fences_too_late(right: _OfNode, state: node.NodeState, now_s: float) -> bool:
    """The margin is added to the end of the lease, in place of being taken off."""
    ends_s = state.lease_ends_s
    return ends_s is not None and now_s >= ends_s + state.config.fence_margin_s


@mistake((node, "_is_alone"))
def waits_for_peers_it_has_not(right: _OfNode, state: node.NodeState) -> bool:
    """A node that is alone in its generation waits for a fault of the others before it stops."""
    return False


@mistake((node, "_enter_if_due"))
def enters_without_a_lease(right: _OfNode, state: node.NodeState, now_s: float) -> _NodeResult:
    """A plan is entered without asking whether the lease still stands."""
    free = replace(state, lost_lease=False, lease_ends_s=None, fenced=False)
    after, effects, reason = right(free, now_s)
    lease = {"lost_lease": state.lost_lease, "lease_ends_s": state.lease_ends_s}
    return replace(after, fenced=state.fenced, **lease), effects, reason


@mistake((node._HANDLERS, node.Registered), slow=True)
def comes_back_without_a_fence(
    right: _OfNode, state: node.NodeState, event: node.Registered, now_s: float
) -> _NodeResult:
    """Who has lost its lease and got another goes on in the generation it was in."""
    result = _without(right(state, event, now_s), node.Fence)
    return replace(result[0], kill_s=state.kill_s), *result[1:]


@mistake((node._HANDLERS, node.LeaseLost))
def never_comes_back(
    right: _OfNode, state: node.NodeState, event: node.LeaseLost, now_s: float
) -> _NodeResult:
    """A lost lease is noted, and no other one is asked for."""
    return _without(right(state, event, now_s), node.Register)


@mistake((node._HANDLERS, node.Renewed), slow=True)
def renewed_and_stays_out(
    right: _OfNode, state: node.NodeState, event: node.Renewed, now_s: float
) -> _NodeResult:
    """A plan that came while the lease was ending is not entered when it is renewed after all."""
    return _without(right(state, event, now_s), node.EnterGeneration)


# ---------------------------------------------------------------- orders and reports


@mistake((node._CHANGES, ch.Ordered))
def carries_orders_out_twice(
    right: _OfNode, state: node.NodeState, change: ch.Ordered, now_s: float
) -> _NodeResult:
    """Orders have no numbers: what the stream shows again is done again."""
    return right(replace(state, last_order=(0, 0), leader_term=0), change, now_s)


@mistake((node._CHANGES, ch.Ordered))
def obeys_orders_to_its_former_life(
    right: _OfNode, state: node.NodeState, change: ch.Ordered, now_s: float
) -> _NodeResult:
    """An order names the node, and not its incarnation."""
    name = state.config.node
    mine = {name: state.incarnation} if name in change.incarnations else {}
    return right(state, replace(change, incarnations=mine), now_s)


@mistake((node, "_tell_inventory"))
def tells_only_one_leader(
    right: Callable[..., _NodeResult | None], state: node.NodeState, event: Any, now_s: float
) -> _NodeResult | None:
    """The inventory is told once, and not to each new leader."""
    if state.told is not None and state.told[0] == state.incarnation:
        return None
    return right(state, event, now_s)


@mistake((node, "_send_due"))
def never_repeats_a_report(
    right: Callable[..., Any], state: node.NodeState, now_s: float
) -> tuple[node.NodeState, Sequence[node.NodeEffect]]:
    """Waits without a timeout for the answer to a request that was lost."""
    return (state, []) if state.sent_s is not None else right(state, now_s)


@mistake((node._HANDLERS, node.Stored))
def takes_all_for_stored(
    right: _OfNode, state: node.NodeState, event: node.Stored, now_s: float
) -> _NodeResult:
    """An answer counts for reports that were not in the request."""
    return right(state, node.Stored(state.next_number), now_s)


# ---------------------------------------------------------------- leaders


@mistake((leader, "_take_over_if_due"), slow=True)
def does_not_wait_for_inventories(right: Callable[..., None], turn: Any) -> None:
    """A new leader begins with the first inventory: who has not told yet counts as gone."""
    known = turn.state.nodes
    turn.set(nodes={name: one for name, one in known.items() if one.joined is not None})
    right(turn)
    turn.set(nodes=known)


@mistake((leader._HANDLERS, leader.WriteFailed), slow=True)
def writes_a_record_once(right: Callable[..., None], turn: Any, event: Any) -> None:
    """A record whose write has not been answered is not written again."""
    turn.set(in_flight=False, queue=turn.state.queue[1:])


def _forgets(**fields: Any) -> Callable[..., takeover.Resumed]:
    """As `takeover.resume`, of an archive that lacks these."""

    def resume(
        right: Callable[..., takeover.Resumed],
        config: Any,
        published: ch.Published | None,
        *rest: Any,
        **more: Any,
    ) -> takeover.Resumed:
        if published is not None and published.archive is not None:
            published = replace(published, archive=replace(published.archive, **fields))
        return right(config, published, *rest, **more)

    return resume


@mistake((takeover, "resume"))
def new_leader_forgets_exclusions(*arguments: Any, **keywords: Any) -> takeover.Resumed:
    """Which slots are excluded is not in the archive."""
    return _forgets(excluded=frozenset())(*arguments, **keywords)


@mistake((takeover, "resume"), slow=True)
def new_leader_forgets_what_was_abandoned(*arguments: Any, **keywords: Any) -> takeover.Resumed:
    """From which steps older generations resumed is not in the archive."""
    return _forgets(cuts=())(*arguments, **keywords)


@mistake((takeover, "resume"))
def new_leader_counts_from_0(
    right: Callable[..., takeover.Resumed], *arguments: Any, **keywords: Any
) -> takeover.Resumed:
    """Workers are numbered from 0 again."""
    resumed = right(*arguments, **keywords)
    return resumed._replace(state=replace(resumed.state, next_number=0))


@mistake((takeover, "resume"))
def new_leader_reads_no_orders(
    right: Callable[..., takeover.Resumed], *arguments: Any, **keywords: Any
) -> takeover.Resumed:
    """Workers that were ordered since the last plan do not count for the next number."""
    return right(*arguments, **{**keywords, "newest_worker": -1})


@mistake((takeover, "resume"))
def new_leader_reads_no_reports(
    right: Callable[..., takeover.Resumed],
    config: Any,
    published: Any,
    inventories: Any,
    backlog: Sequence[Event],
    *rest: Any,
    **more: Any,
) -> takeover.Resumed:
    """What was reported since the last plan was for the old leader."""
    return right(config, published, inventories, (), *rest, **more)


@mistake((takeover, "resume"))
def new_leader_misses_nobody(
    right: Callable[..., takeover.Resumed], *arguments: Any, **keywords: Any
) -> takeover.Resumed:
    """Nodes that went before it came are still there, to it."""
    resumed = right(*arguments, **keywords)
    events = tuple(event for event in resumed.events if not isinstance(event, ev.NodeLeft))
    return resumed._replace(events=events)


# ---------------------------------------------------------------- who may be in the next generation


@mistake((transitions, "choose_members"))
def gives_an_excluded_slot_a_rank(
    right: Callable[..., Membership], state: State, **keywords: Any
) -> Membership:
    """The plan is made without looking at who is excluded."""
    return right(replace(state, excluded=frozenset()), **keywords)


@mistake((transitions, "slots_of"), (capacity, "slots_of"))
def fills_excluded_slots(
    right: Callable[..., Iterator[Slot]], state: State, name: str
) -> Iterator[Slot]:
    """A node that stands by comes in with all of its slots, the excluded ones too."""
    return right(replace(state, excluded=frozenset()), name)


@mistake((transitions, "choose_members"))
def takes_in_more_than_the_most(
    right: Callable[..., Membership], state: State, **keywords: Any
) -> Membership:
    """Every node that stands by comes in, beyond the largest number of nodes."""
    return right(replace(state, config=replace(state.config, max_nodes=10**6)), **keywords)


@mistake((transitions, "_is_quorum"))
def goes_on_below_the_minimum(
    right: Callable[..., bool], move: Move, chosen: Membership, late: bool
) -> bool:
    """Anybody who is there is enough."""
    return chosen.world_size > 0


@mistake((membership, "_dense"))
def leaves_holes_in_the_ranks(right: Callable[..., Any], filled: Ranks) -> dict[int, int]:
    """Ranks beyond the new size do not move down."""
    return {}


@mistake((transitions, "members_of"))
def keeps_the_old_ranks(
    right: Callable[..., tuple[Member, ...]], state: State, chosen: Membership
) -> tuple[Member, ...]:
    """Whoever fills a hole of a world that shrinks is still called by its last rank."""
    members = list(right(state, chosen))
    for new, old in chosen.moves.items():
        members[new] = replace(members[new], rank=old)
    return tuple(members)


@mistake((membership, "_take"))
def gives_one_spare_two_ranks(
    right: Callable[..., Any], extra: dict[Worker, WorkerState], slot: Slot, *, ready: bool
) -> Worker | None:
    """A spare that was taken stays in the list of spares."""
    return right(dict(extra), slot, ready=ready)


@mistake((transitions, "staff"), (coordinator, "staff"))
def forgets_the_spares(right: Callable[..., None], *_: Any, **__: Any) -> None:
    """Neither spares nor workers on nodes that stand by are started."""


@mistake((transitions, "choose_members"), slow=True)
def never_starts_a_replacement(
    right: Callable[..., Membership], state: State, **keywords: Any
) -> Membership:
    """A slot without a spare is waited for, and nobody starts a worker in it."""
    return replace(right(state, **keywords), to_start=())


@mistake((membership, "_take"))
def takes_who_is_not_ready(
    right: Callable[..., Any], extra: dict[Worker, WorkerState], slot: Slot, *, ready: bool
) -> Worker | None:
    """A worker that is still starting, or inside another generation, is as good as a ready one."""
    return right(extra, slot, ready=True) or right(extra, slot, ready=False)


@mistake((transitions, "_hand_over"))
def keeps_members_among_the_extras(right: Callable[..., None], move: Move, *rest: Any) -> None:
    """Who has been given a rank stays in the list of those without one."""
    extras = dict(move.state.extras)
    right(move, *rest)
    move.set(extras={**extras, **move.state.extras})


# ---------------------------------------------------------------- from which step it goes on


@mistake((transitions, "newest_cut"))
def resumes_one_step_too_early(right: Callable[..., Any], *held: Any, **known: Any) -> Cut | None:
    """Each generation resumes one step before the newest that is held."""
    cut: Cut | None = right(*held, **known)
    return cut and replace(cut, step=max(0, cut.step - 1))


@mistake((transitions, "newest_cut"))
def resumes_from_the_oldest(
    right: Callable[..., Cut | None], held: Iterator[Group], **known: Any
) -> Cut | None:
    """The smallest step that somebody holds, in place of the largest."""
    groups = list(held)
    steps = [holding.step for _, holdings in groups for holding in holdings]
    if not steps:
        return right(groups, **known)
    oldest = [(ranks, tuple(h for h in what if h.step == min(steps))) for ranks, what in groups]
    return right(oldest, **{**known, "persisted_step": None})


@mistake((transitions, "newest_cut"))
def forgets_the_disk(right: Callable[..., Cut | None], held: Any, **known: Any) -> Cut | None:
    """Only what is in memory counts."""
    return right(held, **{**known, "persisted_step": None})


@mistake((transitions, "newest_cut"))
def takes_everybody_for_a_holder(
    right: Callable[..., Cut | None], held: Iterator[Group], **known: Any
) -> Cut | None:
    """Whoever holds any step is to give the newest one."""
    groups = list(held)
    cut = right(groups, **known)
    if cut is None or not cut.holders:
        return cut
    ranks = sorted({rank for group, what in groups if what for rank in iterate(group)})
    return replace(cut, holders=tuple(ranks))


@mistake((State, "is_continued"), slow=True)
def counts_an_abandoned_branch(right: Callable[..., bool], state: State, held: Holding) -> bool:
    """A step is a step: also one that the job has not gone on from."""
    return True


@mistake((transitions, "_may_hold_more"))
def does_not_wait_for_holders(right: Callable[..., bool], move: Move, cut: Cut | None) -> bool:
    """A node that is away with the only copies is given up at once."""
    return False


@mistake((transitions, "_may_train_elsewhere"))
def does_not_wait_for_orphans(right: Callable[..., bool], move: Move) -> bool:
    """Nobody of the last generation answers, so it must be gone."""
    return False


# ---------------------------------------------------------------- verdicts, bounds, the end


@mistake((coordinator.TABLE[ev.NodeLeft], Phase.RESTORING), slow=True)
def loses_nodes_in_silence(right: Callable[..., None], move: Move, event: ev.NodeLeft) -> None:
    """A node that is lost while the others restore is taken off the list, and that is all."""
    move.set(nodes={node: num for node, num in move.state.nodes.items() if node != event.node})


@mistake((Move, "current"), nodes=SEVERAL, slow=True)
def hears_any_generation(right: Callable[..., bool], move: Move, generation: int) -> bool:
    """What is told of an older generation counts for the current one."""
    return True


@mistake((Move, "enter"))
def waits_without_a_bound(
    right: Callable[..., None], move: Move, phase: Phase, timeout_s: float | None = None
) -> None:
    """No phase has a deadline."""
    right(move, phase)


@mistake((transitions, "_enforce"))
def never_kills_who_stays(right: Callable[..., None], move: Move, inside: Ranks) -> None:
    """A rank that does not come out in time is given more time, and more."""
    move.enter(Phase.STOPPING, move.state.config.kill_timeout_s)


@mistake((transitions, "_enforce"), nodes=SEVERAL, slow=True)
def kills_who_came_out(right: Callable[..., None], move: Move, inside: Ranks) -> None:
    """When the time is over, all are killed, not only those still inside."""
    roster = move.state.roster
    right(move, roster.alive & ~roster.killed if inside else inside)


@mistake((transitions, "judge"))
def counts_an_error_twice(right: Callable[..., Verdict], state: State) -> Verdict:
    """An error is noted before it is looked up: the first one has been seen before."""
    cause = policy.root_cause(state.faults)
    if cause is not None and cause.error is not None:
        key = (cause.step, cause.error.type_name, cause.error.frame)
        state = replace(state, errors_seen=state.errors_seen | {key})
    return right(state)


@mistake((coordinator, "_count_step"))
def forgets_that_a_step_was_made(right: Callable[..., None], move: Move, step: int) -> None:
    """Every generation counts as one without a step."""


@mistake((transitions._ADVANCE, Phase.RUNNING))
def is_done_when_the_first_one_is(right: Callable[..., None], move: Move) -> None:
    """The first rank to return from the train function ends the job."""
    if move.state.roster.of(Status.FINISHED):
        transitions.close(move, Outcome.DONE, "every rank has finished")
    else:
        right(move)


def main(names: Sequence[str]) -> None:
    rows = table([]).splitlines()
    for name in names or list(MUTANTS):
        print("\n".join([*rows, table([name]).splitlines()[-1]]), flush=True)
        rows = []


if __name__ == "__main__":
    main(sys.argv[1:])
