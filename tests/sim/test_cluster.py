"""A simulated cluster keeps its promises, tells the same story twice, and notices broken ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from resilient.core import leader, node, transitions
from resilient.core.model import Cut, CutKind, Outcome
from resilient.sim import faults as fl
from resilient.sim.content import ROOT, Contents
from resilient.sim.run import Result, run

NUM_SEEDS = 300
SEEDS_A_TEST = 25


def describe(result: Result, num_nodes: int) -> str:
    assert result.violation is not None
    repeat = f"resilient sim run --seed {result.seed} --nodes {num_nodes} --trace"
    tail = "\n".join(result.trace[-12:])
    return f"{result.violation.checker}: {result.violation.text}\nrepeat: {repeat}\n{tail}"


def calm(seed: int, num_nodes: int, **changes: Any) -> fl.Settings:
    """The seed's cluster, in which all nodes take part and nobody answers late."""
    chosen = fl.settings(seed, num_nodes)
    config = dataclasses.replace(chosen.config, min_nodes=num_nodes, max_nodes=num_nodes)
    return dataclasses.replace(chosen, config=config, sloppy=False, length=30, **changes)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_without_faults_it_trains_to_the_end_in_one_generation(num_nodes: int) -> None:
    result = run(1, num_nodes=num_nodes, faults=[], chosen=calm(1, num_nodes))
    assert result.violation is None, describe(result, num_nodes)
    assert result.outcome is Outcome.DONE
    assert result.num_generations == 1


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_no_promise_breaks(first: int) -> None:
    failed = []
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_A_TEST):
        result = run(seed)
        if result.violation is not None:
            failed.append(describe(result, 8))
        else:
            assert result.outcome is not None
            outcomes[result.outcome.value] += 1
    assert not failed, f"{len(failed)} of {SEEDS_A_TEST} seeds failed:\n" + "\n\n".join(failed[:3])
    assert outcomes["done"] > SEEDS_A_TEST // 3, f"hardly any run reaches the end: {outcomes}"


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_no_promise_breaks_in_small_clusters(num_nodes: int) -> None:
    for seed in range(40):
        result = run(seed, num_nodes=num_nodes)
        assert result.violation is None, describe(result, num_nodes)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 12])
def test_no_promise_breaks_in_thousands(num_nodes: int) -> None:
    """The long form: clusters of every size, and seeds that no shorter test has tried."""
    for seed in range(10_000, 12_000):
        result = run(seed, num_nodes=num_nodes)
        assert result.violation is None, describe(result, num_nodes)


def test_a_node_that_is_lost_is_survived() -> None:
    fault = fl.Fault("power", 12.0, node=2, duration_s=400.0)
    chosen = calm(3, 3)
    config = dataclasses.replace(chosen.config, min_nodes=2, min_world_size=1)
    chosen = dataclasses.replace(chosen, config=config, length=None)
    result = run(3, num_nodes=3, faults=[fault], chosen=chosen)
    assert result.violation is None, describe(result, 3)
    assert result.outcome is Outcome.DONE
    assert result.num_generations >= 2


# ---------------------------------------------------------------- the same story twice


def test_a_seed_tells_the_same_story_whatever_the_hash_seed() -> None:
    code = "from resilient.sim.run import run\nfor seed in range(6): print(run(seed).trace_hash)\n"
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]


def test_faults_are_plain_data_and_may_be_left_out() -> None:
    seed = next(s for s in range(50) if len(fl.draw(s, 8)) > 6)
    whole = run(seed)
    assert whole.faults == fl.draw(seed, 8)
    assert run(seed, faults=whole.faults).trace_hash == whole.trace_hash
    fewer = run(seed, faults=whole.faults[::2])
    assert fewer.faults == whole.faults[::2]


def test_the_swarm_has_every_kind_of_fault_and_every_trigger() -> None:
    faults = [fault for seed in range(200) for fault in fl.draw(seed, 8)]
    assert {fault.kind for fault in faults} == {*fl.KINDS, *fl.ENDING_KINDS}
    assert {fault.when for fault in faults} == {"", *fl.PHASES}
    assert all(0 < fault.at_s < fl.HURT_S for fault in faults)


# ---------------------------------------------------------------- broken promises are noticed


def broken(result: Result) -> str | None:
    """The checker that has spoken."""
    return result.violation.checker if result.violation is not None else None


CRASHES = [fl.Fault("crash", 10.0 + 7 * i, node=i, slot=0, arg=-9) for i in range(3)]


def test_a_cut_that_forgets_a_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    newest_cut: Any = transitions.newest_cut

    def older(*args: Any, **kwargs: Any) -> Cut | None:
        cut = newest_cut(*args, **kwargs)
        if cut is not None and cut.kind is CutKind.MEMORY and cut.step > 1:
            return dataclasses.replace(cut, step=cut.step - 1)
        return cut

    monkeypatch.setattr(transitions, "newest_cut", older)
    assert broken(run(3, num_nodes=3, faults=CRASHES, chosen=calm(3, 3))) == "cut"


def test_a_node_that_enters_without_a_lease_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "may_enter", lambda state, now_s: True)
    assert "lease" in {broken(run(seed, num_nodes=4)) for seed in range(20)}


def test_two_worlds_at_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a generation are cut off from the store, and go on among themselves."""
    chosen = calm(5, 4, step_s=1.0, checkpoint_steps=7, spread=0.0)
    config = dataclasses.replace(
        chosen.config, min_nodes=1, max_nodes=2, persists=True, orphan_timeout_s=60.0
    )
    chosen = dataclasses.replace(chosen, config=config, length=None)
    faults = [fl.Fault("orphans", 40.0, duration_s=100.0)]
    honest = run(5, num_nodes=4, faults=faults, chosen=chosen)
    assert honest.violation is None, describe(honest, 4)
    assert honest.num_generations >= 2
    monkeypatch.setattr(transitions, "_may_train_elsewhere", lambda move: False)
    assert broken(run(5, num_nodes=4, faults=faults, chosen=chosen)) == "two worlds"


def test_a_job_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_write_if_due", lambda turn: None)
    assert broken(run(1, num_nodes=2, faults=[], chosen=calm(1, 2))) == "liveness"


def test_a_job_that_gives_up_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(move: Any, *args: Any) -> None:
        transitions.end(move, Outcome.UNRECOVERABLE, "no patience")

    monkeypatch.setattr(transitions, "_decide", give_up)
    assert broken(run(3, num_nodes=3, faults=CRASHES, chosen=calm(3, 3))) == "legitimate end"


def test_an_error_of_the_core_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(transitions, "_decide", raises)
    result = run(3, num_nodes=3, faults=CRASHES, chosen=calm(3, 3))
    assert broken(result) == "exception"
    assert result.violation is not None and "of ours" in result.violation.text


# ---------------------------------------------------------------- the tree of states


def test_states_are_equal_when_their_history_is() -> None:
    contents = Contents()
    one = contents.commit(ROOT, 0)
    assert contents.commit(ROOT, 0) == one
    assert contents.commit(ROOT, 1) != one
    two = contents.commit(one, 0)
    other = contents.commit(one, 1)
    assert contents.steps[two] == contents.steps[other] == 2


def test_ancestors_across_generations() -> None:
    contents = Contents()

    def chain(start: int, generation: int, length: int) -> list[int]:
        nodes = [start]
        for _ in range(length):
            nodes.append(contents.commit(nodes[-1], generation))
        return nodes

    first = chain(ROOT, 0, 10)
    second = chain(first[7], 1, 5)  # what came after 7 in generation 0 is abandoned
    third = chain(second[2], 2, 4)
    lineage = {*first[:8], *second[:3], *third}
    for one in sorted({*first, *second, *third}):
        assert contents.is_ancestor(one, third[-1]) is (one in lineage)
        assert contents.is_ancestor(third[-1], one) is (one == third[-1])
    assert contents.is_ancestor(ROOT, ROOT)
