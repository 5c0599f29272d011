"""The coordinator as a whole: its table is complete, it is pure, and it holds its bounds."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from resilient.core import coordinator, cut, policy
from resilient.core import events as ev
from resilient.core.model import (
    Config,
    Cut,
    CutKind,
    ErrorInfo,
    Fault,
    FaultKind,
    Holding,
    Member,
    Outcome,
    Phase,
    Slot,
    State,
    Worker,
)
from resilient.errors import ConfigError
from tests.core.scenario import Scenario

CORE = Path(coordinator.__file__).parent
FORBIDDEN = {
    "time", "random", "os", "socket", "threading", "asyncio", "logging", "torch", "numpy",
    "subprocess", "secrets", "uuid", "datetime", "multiprocessing",
}  # fmt: skip
W0, W1, W2 = (Worker("n0", number) for number in range(3))
ERROR = ErrorInfo("builtins.ValueError", "train.py:7")
LIVE = (Holding(5, "live"),)


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_core_is_pure(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in FORBIDDEN, f"{path.name} imports {name}"
            if name.startswith("resilient"):
                assert name.startswith(("resilient.core", "resilient.errors")), name


# ---------------------------------------------------------------- the table


EXAMPLES: dict[type[Any], ev.Event] = {
    type(event): event
    for event in (
        ev.NodeJoined("n1", 2),
        ev.NodeLeft("n0"),
        ev.StoreOpened(1, "127.0.0.1", 2),
        ev.WorkerReady(W2),
        ev.WorkerJoined(W0, 0),
        ev.WorkerRestored(W0, 0),
        ev.WorkerStepped(W0, 0, 6),
        ev.WorkerInterrupted(W0, 0, 5, LIVE),
        ev.WorkerFailed(W0, 0, 5, ERROR, False, LIVE),
        ev.WorkerFinished(W0, 0, 5, LIVE),
        ev.WorkerExited(W0, -9, 5),
        ev.WorkersHung(0, (W0, W1), 5, 0.0),
        ev.WorkerSlow(W0, 0),
        ev.PaceMeasured(0.1),
        ev.HealthCheckFailed(Slot("n0", 0), "bad"),
        ev.Persisted(W0, 5),
        ev.DrainRequested(15),
        ev.TimePassed(),
        ev.Alike(ev.WorkerInterrupted(W0, 0, 5, LIVE), ((0, 1),)),
    )
}


def in_phase(phase: Phase, config: Config) -> Scenario:
    """A world of two, brought to that phase."""
    scenario = Scenario()
    scenario.state = coordinator.initial(config)
    if phase is Phase.FORMING:
        scenario.line("fresh 2")
        scenario.line("ready w0")
    else:
        scenario.line("world 2")
    scenario.now_s = 10.0
    lines = {
        Phase.STOPPING: ["exited w1 -9 step=5"],
        Phase.COLLECTING: ["exited w1 -9 step=5", "interrupted w0 step=5"],
        Phase.RESTORING: ["ready w2", "exited w1 -9 step=5", "interrupted w0 step=5"],
        Phase.CLOSED: ["drain 15", "interrupted w0 step=0 none", "interrupted w1 step=0 none"],
    }
    for line in lines.get(phase, []):
        scenario.line(line)
    assert scenario.state.phase is phase
    return scenario


def test_every_cell_of_the_table_is_there() -> None:
    events = set(ev.Event.__args__)
    assert set(coordinator.TABLE) == events == set(EXAMPLES)
    for row in coordinator.TABLE.values():
        assert set(row) == set(Phase)


@pytest.mark.parametrize("event", EXAMPLES.values(), ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_every_cell_can_be_tried(phase: Phase, event: ev.Event) -> None:
    """Right, stale and future generations: no cell raises, all leave a sound state."""
    events = [event]
    if hasattr(event, "generation"):
        events = [dataclasses.replace(event, generation=g) for g in (0, 1, 7)]
    for tried in events:
        scenario = in_phase(phase, Config(persists=True))
        before = scenario.state
        decision = coordinator.step(before, tried, 11.0)
        assert decision == coordinator.step(before, tried, 11.0)
        assert decision.reason
        if decision.state.phase in (Phase.STOPPING, Phase.COLLECTING):
            assert decision.wake_s is not None and decision.wake_s > 11.0
        assert not decision.state.finished or isinstance(decision.effects[-1], ev.Finish)


def test_after_finish_nothing_is_decided() -> None:
    scenario = in_phase(Phase.CLOSED, Config())
    for number in range(3):
        scenario.line(f"exited w{number} 75")
    assert scenario.state.finished
    for event in EXAMPLES.values():
        decision = coordinator.step(scenario.state, event, 20.0)
        assert decision == ev.Decision(scenario.state, (), None, "the job has ended")


def test_the_cause_of_the_end_is_told() -> None:
    scenario = in_phase(Phase.RUNNING, Config(num_spares=0))
    for line in (
        "failed w1 step=5",
        "interrupted w0 step=5",
        "enter",
        "store 2",
        "failed w0 step=5",
        "interrupted w1 step=5",
        "exited w0 1",
    ):
        scenario.line(line)
    decision = coordinator.step(scenario.state, ev.WorkerExited(W1, 1), 20.0)
    (finish,) = decision.effects
    assert isinstance(finish, ev.Finish) and finish.root_cause is not None
    assert finish.outcome is Outcome.TRAIN_FUNCTION_FAILED
    assert (finish.root_cause.rank, finish.root_cause.step) == (0, 5)
    assert "builtins.ValueError again at step 5" in finish.reason


# ---------------------------------------------------------------- policy and cut


def fault(kind: FaultKind, status: int | None = None, note: str = "") -> Fault:
    return Fault(kind, W0, 0, 0, 5, 1.0, status=status, note=note)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], None),
        ([fault(FaultKind.COLLECTIVE), fault(FaultKind.RAISED), fault(FaultKind.DIED, -9)], 2),
        ([fault(FaultKind.COLLECTIVE), fault(FaultKind.RAISED)], 1),
        ([fault(FaultKind.RAISED), fault(FaultKind.HUNG)], 1),
        ([fault(FaultKind.HUNG), fault(FaultKind.HUNG, -9)], 1),
        ([fault(FaultKind.HUNG, -9), fault(FaultKind.DIED, 1)], 1),
        ([fault(FaultKind.DIED, 1), fault(FaultKind.DIED, -9)], 0),
        ([fault(FaultKind.DIED, 1), fault(FaultKind.NODE_LOST)], 0),
        ([fault(FaultKind.COLLECTIVE, note="a"), fault(FaultKind.COLLECTIVE, note="b")], 0),
    ],
)
def test_root_cause(faults: list[Fault], expected: int | None) -> None:
    found = policy.root_cause(faults)
    assert found is (None if expected is None else faults[expected])


MEMBERS = tuple(Member(rank, Slot("n0", rank), Worker("n0", rank)) for rank in range(3))


@pytest.mark.parametrize(
    ("held", "committed", "persisted", "expected"),
    [
        ({}, 0, None, Cut(CutKind.INITIAL, 0)),
        ({}, 7, None, None),
        ({}, 7, 4, Cut(CutKind.DISK, 4)),
        ({0: [7], 1: [7]}, 7, None, Cut(CutKind.MEMORY, 7, (0, 1))),
        ({0: [7], 1: [8]}, 8, None, Cut(CutKind.MEMORY, 8, (1,))),
        ({0: [7], 1: [6, 7], 2: [6]}, 8, 5, Cut(CutKind.MEMORY, 7, (0, 1))),
        ({0: [4]}, 7, 4, Cut(CutKind.MEMORY, 4, (0,))),
        ({0: [3]}, 7, 4, Cut(CutKind.DISK, 4)),
        ({0: [0], 1: [0]}, 0, None, Cut(CutKind.MEMORY, 0, (0, 1))),
        ({9: [8]}, 8, None, None),  # held by a worker that is no member
    ],
)
def test_the_cut(
    held: dict[int, list[int]], committed: int, persisted: int | None, expected: Cut | None
) -> None:
    holdings = {Worker("n0", rank): [Holding(s) for s in steps] for rank, steps in held.items()}
    found = cut.find_cut(MEMBERS, holdings, committed_step=committed, persisted_step=persisted)
    assert found == expected


def test_receivers_are_spread_over_the_holders() -> None:
    memory = Cut(CutKind.MEMORY, 5, (1, 3))
    sources = [cut.source_of(memory, rank, 6) for rank in range(6)]
    assert sources == [1, None, 3, None, 1, 3]
    with pytest.raises(ValueError):
        cut.source_of(Cut(CutKind.DISK, 5), 0, 2)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "config",
    [
        {"min_world_size": 0},
        {"num_spares": -1},
        {"max_restarts": -1},
        {"grace_s": 0.0},
        {"interrupt_timeout_s": 20.0},
        {"kill_timeout_s": 70.0},
        {"kill_timeout_s": 5.0},
    ],
)
def test_a_configuration_out_of_range_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        coordinator.initial(Config(**config))


def test_a_state_is_never_changed_in_place() -> None:
    state: State = in_phase(Phase.RUNNING, Config()).state
    copies = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    frozen = {name: dict(v) if isinstance(v, dict) else v for name, v in copies.items()}
    for event in EXAMPLES.values():
        coordinator.step(state, event, 50.0)
    for name, value in frozen.items():
        assert getattr(state, name) == value, name


def test_the_first_world_size_stays_in_every_plan() -> None:
    """Also where nothing was committed before the world shrank: parts keep their size."""
    state = coordinator.initial(Config(replace=False, num_spares=0))
    plans = []
    for now_s, event in enumerate(
        [
            ev.NodeJoined("n0", 3),
            ev.StoreOpened(0, "h", 1),
            *(ev.WorkerReady(worker) for worker in (W0, W1, W2)),
            ev.StoreOpened(1, "h", 2),
            ev.WorkerExited(W1, -9),
            ev.WorkerInterrupted(W0, 0, 0, ()),
            ev.WorkerInterrupted(W2, 0, 0, ()),
        ]
    ):
        decision = coordinator.step(state, event, float(now_s))
        state = decision.state
        plans += [e.plan for e in decision.effects if isinstance(e, ev.PublishPlan)]
    assert [(p.world_size, p.first_world_size, p.cut.kind) for p in plans] == [
        (3, 3, CutKind.INITIAL),
        (2, 3, CutKind.INITIAL),
    ]
