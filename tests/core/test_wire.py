"""Messages and the journal's events: every one goes out and comes back, nothing else comes in."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient import wire
from resilient.core import events as ev
from resilient.core.model import (
    Cut,
    CutKind,
    ErrorInfo,
    Fault,
    FaultKind,
    Holding,
    Member,
    Outcome,
    Plan,
    Slot,
    Worker,
)
from tests.core.test_coordinator import EXAMPLES

HOLDINGS = (Holding(40, "live"), Holding(39, "undo"))
ERROR = ErrorInfo("builtins.ValueError", "train.py:7 in main", "Traceback ...")
CUT = Cut(CutKind.MEMORY, 40, (0, 2))

FROM_WORKER: list[wire.Message] = [
    wire.Ready(persisted_step=3),
    wire.Ready(),
    wire.Joined(1),
    wire.Restored(1),
    wire.Stepped(1, 41),
    wire.Interrupted(1, 40, HOLDINGS, 30),
    wire.Failed(1, 40, ERROR, True, HOLDINGS),
    wire.Finished(1, 40, ()),
    wire.Persisted(40),
    wire.Persisted(None, "disk full"),
    wire.DrainRequest(15),
]
FROM_AGENT: list[wire.Message] = [
    wire.Start(1, 2, 2, 4, "127.0.0.1", 29500, CUT, {"RANK": "2"}, 6, ("kill:rank=2,step=40",)),
    wire.Abort(1, "rank 2 was killed by signal 9"),
    wire.Persist(40),
    wire.Look(),
    wire.Close(),
    wire.Stop(70, "no copy is left"),
]


def test_every_message_is_tried() -> None:
    assert {type(m) for m in FROM_WORKER} == set(get_args(wire.FromWorker))
    assert {type(m) for m in FROM_AGENT} == set(get_args(wire.FromAgent))


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda m: type(m).__name__)
def test_a_workers_message_comes_back_as_it_was(message: wire.Message) -> None:
    assert wire.decode_from_worker(wire.encode(message)) == message
    with pytest.raises(wire.WireError):
        wire.decode_from_agent(wire.encode(message))


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda m: type(m).__name__)
def test_an_agents_message_comes_back_as_it_was(message: wire.Message) -> None:
    back = wire.decode_from_agent(wire.encode(message))
    assert back == message
    if isinstance(back, wire.Start):
        assert isinstance(back.cut, Cut) and isinstance(back.cut.kind, CutKind)
    with pytest.raises(wire.WireError):
        wire.decode_from_worker(wire.encode(message))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(FROM_WORKER) - 1), st.data())
def test_no_bytes_raise_anything_but_a_wire_error(
    noise: bytes, index: int, data: st.DataObject
) -> None:
    good = wire.encode(FROM_WORKER[index])
    at = data.draw(st.integers(0, len(good)))
    for text in (noise, good[:at], good[:at] + noise, good[:at] + noise + good[at + 1 :]):
        try:
            wire.decode_from_worker(text)
        except wire.WireError:
            pass


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Joined"},
        {"type": "Joined", "generation": "1"},
        {"type": "Joined", "generation": 1.5},
        {"type": "Interrupted", "generation": 1, "step": 2, "holdings": [{"step": "x"}]},
        {"type": "Nothing"},
        {"generation": 1},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_fields_are_checked(fields: Any) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_from_worker(msgspec.msgpack.encode(fields))


def test_what_a_socket_would_refuse_is_refused_here() -> None:
    with pytest.raises(wire.WireError, match="too large"):
        wire.encode(wire.Abort(1, "x" * wire.MAX_MESSAGE_BYTES))


# ---------------------------------------------------------------- journal


@pytest.mark.parametrize("event", EXAMPLES.values(), ids=lambda event: type(event).__name__)
def test_an_event_goes_through_json_and_comes_back(event: ev.Event) -> None:
    line = json.dumps(wire.event_to_json(event))
    back = wire.event_from_json(json.loads(line))
    assert back == event and type(back) is type(event)
    for name in ("worker", "slot"):
        if hasattr(event, name):
            assert type(getattr(back, name)) is type(getattr(event, name))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "Nothing"},
        {"type": "WorkerJoined", "worker": ["n0", 1]},
        {"type": "WorkerJoined", "worker": ["n0", "1"], "generation": 1},
        {"type": "WorkerJoined", "worker": "n0", "generation": 1},
    ],
    ids=str,
)
def test_a_wrong_event_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError):
        wire.event_from_json(value)


PLAN = Plan(1, (Member(0, Slot("n0", 0), Worker("n0", 0)),), ("127.0.0.1", 1), CUT)
CAUSE = Fault(FaultKind.RAISED, Worker("n0", 0), 0, 1, 40, 12.5, error=ERROR)
EFFECTS: list[ev.Effect] = [
    ev.OpenStore(1),
    ev.StartWorker(Worker("n0", 0), Slot("n0", 0), PLAN),
    ev.PublishPlan(PLAN),
    ev.StartGeneration(PLAN),
    ev.AbortGeneration(1, (Worker("n0", 0),), "why"),
    ev.DumpStacks((Worker("n0", 0),)),
    ev.TerminateWorker(Worker("n0", 0)),
    ev.KillWorker(Worker("n0", 0), "why"),
    ev.ExcludeSlot(Slot("n0", 0), "why"),
    ev.Persist(Worker("n0", 0), 40),
    ev.Look(Worker("n0", 0)),
    ev.Close((Worker("n0", 0),)),
    ev.Stop((Worker("n0", 0),), Outcome.DRAINED, "why"),
    ev.Finish(Outcome.TRAIN_FUNCTION_FAILED, CAUSE, "why"),
]


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: type(effect).__name__)
def test_every_effect_can_be_written_to_the_journal(effect: ev.Effect) -> None:
    value = json.loads(json.dumps(wire.effect_to_json(effect)))
    assert value["type"] == type(effect).__name__


def test_every_effect_is_tried() -> None:
    assert {type(effect) for effect in EFFECTS} == set(ev.Effect.__args__)
