"""Thousands of decisions in plausible lives of a node, each checked; see walk.py."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient.core import membership, policy, transitions
from resilient.core.model import Cut, CutKind, Phase, Status
from resilient.core.move import Move
from resilient.core.ranks import iterate
from tests.core import walk

NUM_SEEDS = 400
BATCH = 50


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_walk(first: int) -> None:
    ends = [walk.run(seed)[-1] for seed in range(first, first + BATCH)]
    assert all("finish" in end for end in ends)
    assert sum("finish done" in end for end in ends) >= BATCH / 5, (
        "the faults are too cruel to tell"
    )


def test_a_walk_does_not_depend_on_the_hash_seed() -> None:
    """Sets iterate in another order in another process; decisions must not follow them."""
    program = (
        "from tests.core import walk\n"
        "for seed in range(40):\n"
        "    print(*walk.run(seed), sep='\\n')\n"
    )
    digests = set()
    root = Path(__file__).parents[2]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, cwd=root, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.count(b"\n") > 1000
        digests.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(digests) == 1


# ---------------------------------------------------------------- the walk bites


def _oldest_cut(held: Any, **_: Any) -> Cut:
    groups = list(held)
    steps = [holding.step for _, holdings in groups for holding in holdings]
    if not steps:
        return Cut(CutKind.INITIAL, 0)
    oldest = min(steps)
    holders = [ranks for ranks, holdings in groups if oldest in {h.step for h in holdings}]
    return Cut(CutKind.MEMORY, oldest, tuple(sorted(r for g in holders for r in iterate(g))))


def _no_killing(move: Move, inside: list[Any]) -> None:
    move.enter(Phase.STOPPING, 5.0)


def _no_deadline(move: Move, phase: Phase, timeout_s: float | None = None) -> None:
    move.set(phase=phase, deadline_s=None)


def _holes(filled: Any) -> Any:
    return {}


def _hasty(move: Move) -> None:
    if not any(known.killed for known in move.state.workers.values()):
        transitions._decide(move)


_decide = transitions._decide


def _decide_aloud(move: Move) -> None:
    move.why(policy.judge(move.state).reason)
    _decide(move)


def _all_spares_ready(extra: Any, slot: Any, *, ready: bool) -> Any:
    return next((w for w in list(extra) if extra.pop(w)), None)


def _no_check(move: Move, generation: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (transitions, "newest_cut", _oldest_cut),
        (transitions, "_enforce", _no_killing),
        (transitions, "_decide", _decide_aloud),
        (Move, "enter", _no_deadline),
        (membership, "_dense", _holes),
        (membership, "_take", _all_spares_ready),
        (Move, "current", _no_check),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_broken_core_is_found(
    where: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, mutant)
    for seed in range(300):
        try:
            walk.run(seed)
        except AssertionError:
            return
    pytest.fail("300 seeds did not notice")


def test_deciding_before_all_have_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transitions._ADVANCE, Phase.STOPPING, _hasty)
    with pytest.raises(AssertionError):
        for seed in range(300):
            walk.run(seed)


def test_a_repeated_ready_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.core import coordinator
    from resilient.core import events as ev

    def ready(move: Move, event: ev.WorkerReady) -> None:
        if move.worker(event.worker):
            move.set(decorated=True)
            move.change(event.worker, status=Status.READY)

    row = dict.fromkeys(Phase, ready)
    monkeypatch.setitem(coordinator.TABLE, ev.WorkerReady, row)
    with pytest.raises(AssertionError):
        for seed in range(300):
            walk.run(seed)
