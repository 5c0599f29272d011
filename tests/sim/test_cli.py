"""`resilient sim run`: what it prints of runs that fail, and how it ends; and that a trace depends
on its seed alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilient.cli import main
from resilient.core.model import Cut, CutKind, Outcome, Plan
from resilient.sim import cli, faults
from resilient.sim.run import run
from resilient.sim.show import show
from tests.sim.mutants import resume_too_early

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Violation:
    checker: str
    text: str
    time_s: float


@dataclass(frozen=True)
class Result:
    outcome: Outcome | None
    sim_s: float
    violation: Violation | None
    trace: list[str]
    trace_hash: str
    faults: list[str]


def simulate(seed: int, *, num_nodes: int = 8, faults: Sequence[str] | None = None) -> Result:
    """Seeds that end in 3 break a promise, by one of their faults."""
    happened = ["calm", "guilty", "calm too"] if faults is None else list(faults)
    failed = seed % 10 == 3 and "guilty" in happened
    return Result(
        outcome=None if failed else Outcome.DONE if seed % 2 else Outcome.DRAINED,
        sim_s=100.0,
        violation=Violation(
            "one-step-once", f"in these lines\nstep 7 of node {num_nodes - 1}\n", 12.5
        )
        if failed
        else None,
        trace=[f"0.000 {len(happened)} faults to come", "12.500 it happens"],
        trace_hash=f"hash-{seed}",
        faults=happened,
    )


@pytest.fixture(autouse=True)
def fake_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", simulate)


FAILURE = (
    "seed {seed}: one-step-once: step 7 of node {last}, at 12.500 s; "
    "repeat: resilient sim run --seed {seed} --nodes {nodes} --trace"
)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_runs_that_keep_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", "--seeds", "4:10"]) == 0
    (summary,) = lines_of(capsys)
    assert summary.startswith("6 seeds: 0 failed; 600 s simulated in ")
    assert summary.endswith(" s; 3 done, 3 drained")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_each_failure_is_one_line_in_order(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", "--seeds", "0:25", "--nodes", "5", "--jobs", jobs]) == 1
    out = lines_of(capsys)
    assert out[:3] == [FAILURE.format(seed=seed, last=4, nodes=5) for seed in (3, 13, 23)]
    assert out[3].startswith("25 seeds: 3 failed; 2500 s simulated in ")
    assert out[3].endswith("; 9 done, 13 drained, 3 not ended")
    assert len(out) == 4


def test_the_command_that_a_failure_names_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sim", "run", "--seeds", "13"])
    first = lines_of(capsys)[0]
    command = first.partition("repeat: resilient ")[2].split()
    assert main(command) == 1
    out = lines_of(capsys)
    assert out[:3] == ["0.000 3 faults to come", "12.500 it happens", first]


def test_one_seed_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", "--seed", "4", "--shrink"]) == 0
    nothing, summary = lines_of(capsys)
    assert nothing == "every promise was kept: there is nothing to shrink"
    assert summary.startswith("1 seed: 0 failed; ")


class Closed:
    """Output that nobody reads after some lines."""

    def __init__(self, num_lines: int) -> None:
        self.num_left = num_lines

    def write(self, text: str) -> int:
        self.num_left -= text.count("\n")
        if self.num_left < 0:
            raise BrokenPipeError
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--seeds", "0:25"], 1),
        (["--seed", "13", "--trace"], 1),
        (["--seed", "14", "--trace"], 0),
        (["--seeds", "4:10"], 0),
    ],
)
@pytest.mark.parametrize("num_lines", [0, 1])
def test_the_exit_code_is_that_of_the_result_whoever_reads_on(
    arguments: list[str], code: int, num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Closed(num_lines))
    assert main(["sim", "run", *arguments]) == code


def test_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", "--seeds", "4:6", "--hash"]) == 0
    assert lines_of(capsys)[:2] == ["4 hash-4", "5 hash-5"]


def test_shrunk_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", "--seed", "3", "--shrink"]) == 1
    assert lines_of(capsys)[:-1] == [
        FAILURE.format(seed=3, last=7, nodes=8),
        "fewest faults found: 1 of 3",
        "  guilty",
        "trace with these:",
        "  0.000 1 faults to come",
        "  12.500 it happens",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0:4", "--trace"], "--trace is for a single seed"),
        (["--seeds", "4", "--nodes", "0"], "--nodes and --jobs must be at least 1"),
        (["--seeds", "4", "--jobs", "0"], "--nodes and --jobs must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"resilient: {says}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("seeds", ["x", "5:5", "9:3", "1:x", "1:2:3", ""])
def test_seeds_that_are_none(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "run", "--seeds", seeds])
    assert ended.value.code == 2
    assert f"no seeds in {seeds!r}" in capsys.readouterr().err


# ---------------------------------------------------------------- the real one


def hashes(hash_seed: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "resilient.cli", "sim", "run", "--seeds", "0:10", "--hash"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode in (0, 1), (
        done.stdout + done.stderr
    )  # whether they fail is not the point
    return [line for line in done.stdout.splitlines() if len(line.split()) == 2]


def test_a_trace_begins_with_what_was_drawn() -> None:
    first, second = run(1, num_nodes=3).trace[:2]
    assert re.match(
        r"0\.000 cluster nodes 3, slots of each \d, with ranks 1 to [123] nodes, ", first
    )
    assert re.search(r"spares of each \d, replace (yes|no), checkpoints ", first)
    assert re.match(r"0\.000 cluster lease 10 s, .*; timeouts in s: interrupt 5, ", second)


def test_a_plan_that_begins_anew_has_no_holders() -> None:
    assert any(" initial 0" in text for text in run(1, num_nodes=3).trace)
    assert show(Plan(0, (), ("a", 1), Cut(CutKind.INITIAL, 0, ()))) == "0[] initial 0"


def test_a_trace_depends_on_its_seed_alone() -> None:
    """Two processes, in which sets and dicts of strings have different orders."""
    first = hashes("1")
    assert len({line.split()[1] for line in first}) == 10, f"ten seeds, ten traces: {first}"
    assert hashes("2") == first


def test_a_broken_core_is_caught_and_its_faults_are_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_too_early(monkeypatch)
    monkeypatch.setattr(cli, "run", run)
    for seed in range(20):
        code = main(["sim", "run", "--seed", str(seed), "--shrink"])
        out = lines_of(capsys)
        if code and out[0].startswith(f"seed {seed}: cut: "):
            break
    else:
        pytest.fail("no seed of 20 has noticed")
    found = re.fullmatch(r"fewest faults found: (\d+) of (\d+)", out[1])
    assert found is not None, out[1]
    assert int(found[1]) <= 2 < int(found[2]), "one fault is enough for a recovery"
    assert out[-2].split(" ", 3)[3].startswith("violation cut: "), (
        "the trace ends with what was seen"
    )


# ---------------------------------------------------------------- the page about it


def names_of_checkers() -> set[str]:
    """Every name that is given to `ensure(holds, NAME, ...)`, `fail(NAME, ...)` or a violation."""
    places = {"ensure": 1, "fail": 0, "Violation": 0, "CheckFailed": 0}
    found = set()
    for path in sorted((ROOT / "resilient" / "sim").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in places and len(node.args) > places[name]:
                argument = node.args[places[name]]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    found.add(argument.value)
    return found


def test_every_fault_and_every_promise_is_explained() -> None:
    told = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "simulator.md").read_text()))
    kinds = {*faults.KINDS, *faults.ENDING_KINDS, *faults.PHASES}
    checkers = names_of_checkers()
    assert {"liveness", "exception", "ranks"} <= checkers, "the names are where they were"
    assert sorted((kinds | checkers) - told) == [], "not in docs/simulator.md"
