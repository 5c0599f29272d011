"""How a leader takes over: from the last plan, its archive, and what the nodes tell."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import leader as ld
from resilient.core import takeover
from resilient.core.model import (
    Cut,
    CutKind,
    Fault,
    FaultKind,
    Holding,
    Member,
    Outcome,
    Phase,
    Plan,
    Roster,
    Slot,
    State,
    Worker,
    WorkerState,
)
from tests.core.job import CONFIG, Job, show, training
from tests.core.scenario import parse_report, parse_worker


def test_it_waits_until_every_node_has_told_what_it_runs() -> None:
    job = Job()
    job.arrive("n0")
    job.arrive("n1")
    job.arrive("n2")
    assert job.elect("n1") == [] and job.joined("n0") == [] and job.joined("n1") == []
    assert job.opened == [] and job.state is not None and job.state.job is None
    # Who does not answer keeps it waiting no longer than its lease.
    assert job.gone("n2") == ["start w0 n0/0", "start w1@n1 n1/0"]
    assert job.opened == [0]


def test_it_begins_once_the_stream_has_confirmed_it() -> None:
    job = Job()
    job.arrive("n0")
    job.term, job.state = 1, ld.initial(CONFIG, "n0", 1)
    job.feed(job.nodes["n0"])
    job.joined("n0")
    assert job.opened == []
    job.feed(ch.LeaderChanged(None, 0))  # of the one before
    assert job.opened == []
    job.feed(ch.LeaderChanged("n0", 1))
    assert job.opened == [0]


def test_what_was_told_to_an_older_leader_does_not_count() -> None:
    job = Job()
    job.arrive("n0")
    job.elect("n0")
    job.joined("n0")
    job.elect("n0")
    assert job.state is not None and job.state.job is None
    job.joined("n0")
    assert job.core.nodes == {"n0": 1}


def test_while_everybody_trains_nobody_notices() -> None:
    job = training()
    assert job.elect("n1") == []
    assert job.joined("n0", "w0/0:restored:g0:s40") == []
    assert job.joined("n1", "w1@n1/0:restored:g0:s40") == []
    assert job.core.phase is Phase.RUNNING and job.core.committed_step >= 1
    assert job.opened[-1] == 1
    assert job.exited("w0") == ["abort 0: w1@n1"]


def test_while_the_first_workers_start_none_is_started_twice() -> None:
    job = Job()
    job.arrive("n0")
    job.arrive("n1")
    job.elect("n0")
    job.joined("n0")
    assert job.joined("n1") == ["start w0 n0/0", "start w1@n1 n1/0"]
    job.ready("w0")
    job.elect("n1")
    job.joined("n0", "w0/0:ready")
    assert job.joined("n1", "w1@n1/0:starting") == []
    (line,) = job.ready("w1@n1")
    assert line == "publish 0: 0=w0 1=w1@n1; initial 0"


def test_in_the_middle_of_stopping_it_begins_again() -> None:
    job = training()
    job.exited("w1@n1")
    job.feed(job.left("w0", 40))
    assert job.written[-1] == job.orders[-1]  # a replacement was ordered, and has not come yet
    assert show(job.orders[-1]) == ["start w2@n1 n1/0"]
    job.elect("n1")
    job.joined("n0", "w0/0:ready:g0:s40:live40")
    # w1's exit and how w0 left were reported: both count as if they came now.
    assert job.joined("n1", "w2@n1/0:starting") == ["abort 0: w0"]
    assert job.core.phase is Phase.COLLECTING
    assert job.ready("w2@n1") == ["publish 1: 0=w0 1=w2@n1; memory 40 from 0"]


def test_a_rank_that_is_still_inside_is_aborted_again() -> None:
    job = training()
    job.exited("w1@n1")
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s40")
    assert job.joined("n1") == ["abort 0: w0"]
    assert job.feed(job.left("w0", 40)) == ["start w2@n1 n1/0"]


def test_a_death_that_nobody_could_tell_of_is_seen_in_the_inventory() -> None:
    job = training()
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s40")
    assert job.joined("n1") == ["abort 0: w0"]
    assert [fault.worker for fault in job.core.faults] == [Worker("n1", 1)]


def test_in_the_middle_of_restoring_it_goes_on() -> None:
    job = training()
    job.exited("w1@n1")
    job.feed(job.left("w0", 40))
    job.ready("w2@n1")
    assert job.core.phase is Phase.RESTORING
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g1:s40")
    assert job.joined("n1", "w2@n1/0:joined:g1:s40") == []
    assert job.core.phase is Phase.RESTORING
    job.report("n1", ev.WorkerRestored(Worker("n1", 2), 1))
    assert job.core.phase is Phase.RUNNING


def test_a_failure_while_restoring_is_judged_by_the_next_leader() -> None:
    job = training()
    job.exited("w1@n1")
    job.feed(job.left("w0", 40))
    job.ready("w2@n1")
    job.exited("w2@n1")
    job.elect("n1")
    job.joined("n0", "w0/0:entered:g1:s40")
    assert job.joined("n1") == ["abort 1: w0"]
    assert job.feed(job.left("w0", 40, 1)) == ["start w3@n1 n1/0"]
    assert job.core.num_barren == 1


def test_a_node_that_went_and_came_while_nobody_led() -> None:
    job = training()
    job.gone("n1")
    job.arrive("n1")
    job.elect("n0")
    job.joined("n0", "w0/0:restored:g0:s40")
    assert job.joined("n1", "w1@n1/0:ready:g0:s40:live40") == ["abort 0: w0"]
    assert job.feed(job.left("w0", 40)) == ["publish 1: 0=w0 1=w1@n1; memory 40 from 0,1"]


def test_worker_numbers_that_only_orders_know_are_not_given_again() -> None:
    """A worker was started after the last plan, and its node is gone: no inventory knows it."""
    job = training()
    job.arrive("n2")
    assert job.joined("n2") == ["start w2@n2 n2/0"]
    job.gone("n2", certain=True)
    job.arrive("n2")
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s40")
    job.joined("n1", "w1@n1/0:restored:g0:s40")
    assert job.joined("n2") == ["start w3@n2 n2/0"]


def test_worker_numbers_of_inventories_are_not_given_again() -> None:
    job = training()
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s40")
    job.joined("n1", "w1@n1/0:restored:g0:s40", "w17@n1:ready")
    job.exited("w0")
    job.exited("w17@n1")
    assert job.feed(job.left("w1@n1", 40)) == ["start w18 n0/0"]


def test_who_came_is_known_before_who_left() -> None:
    """--nnodes 1: the node that trained is lost, and the new leader's own is there instead."""
    config = replace(CONFIG, max_nodes=1)
    job = training(config, num_nodes=1)
    job.arrive("n1")
    job.joined("n1")
    job.gone("n0")
    job.elect("n1")
    assert job.joined("n1", "w1@n1/0:ready") == []
    nodes = [event for event in job.events if isinstance(event, ev.NodeJoined | ev.NodeLeft)]
    assert [(type(event), event.node) for event in nodes[-2:]] == [
        (ev.NodeJoined, "n1"),
        (ev.NodeLeft, "n0"),
    ]
    assert job.core.phase is Phase.COLLECTING and job.core.outcome is None


@pytest.mark.parametrize("step", [0, 5])
def test_whether_a_generation_was_barren_is_told_by_the_inventories(step: int) -> None:
    """A WorkerStepped is gone with its node's incarnation, or was never heard."""
    job = training(replace(CONFIG, max_barren_generations=1, persists=True))
    job.reports = []
    job.elect("n1")
    job.joined("n0", f"w0/0:restored:g0:s{step}", "persisted=0")
    job.joined("n1", f"w1@n1/0:restored:g0:s{step}")
    job.exited("w1@n1")
    lines = job.exited("w0")
    if step:
        assert lines == ["start w2 n0/0", "start w3@n1 n1/0"]
    else:
        assert lines == ["closed unrecoverable"]


def test_what_is_on_disk_is_told_by_the_inventories() -> None:
    job = training(replace(CONFIG, persists=True))
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s210", "persisted=200")
    job.joined("n1", "w1@n1/0:restored:g0:s210", "persisted=150")
    assert job.core.persisted_step == 200
    job.exited("w0")
    job.exited("w1@n1")
    assert job.ready("w2") == []
    assert job.ready("w3@n1", persisted=100) == ["publish 1: 0=w2 1=w3@n1; disk 200"]


def test_that_the_script_is_decorated_is_told_by_the_inventories() -> None:
    job = Job()
    for node in ("n0", "n1"):
        job.arrive(node)
    job.elect("n0")
    job.joined("n0")
    job.joined("n1")
    job.ready("w1@n1")
    job.gone("n1", certain=True)
    job.elect("n0")
    job.joined("n0", "w0/0:starting", decorated=True)
    job.at(CONFIG.last_call_s)
    assert job.exited("w0", 0) == ["start w3 n0/0"]  # else: the script has ended well, all done


def test_a_start_from_nothing_waits_for_those_who_may_have_made_steps() -> None:
    """Nobody of the last generation is there, and its archive is from before its first step."""
    job = training()
    job.gone("n0")
    job.gone("n1")
    job.arrive("n2")
    job.elect("n2")
    assert "start w2@n2 n2/0" in job.joined("n2")
    assert job.ready("w2@n2") == []
    job.at(400.0)  # whoever has been cut off has stopped by now
    assert job.core.phase is Phase.COLLECTING and job.core.unsure
    job.arrive("n0")
    assert job.joined("n0", "w0/0:ready:g0:s7:live7") == [
        "publish 1: 0=w0 1=w2@n2; memory 7 from 0"
    ]


def test_one_of_the_last_generation_can_say_that_it_made_no_step() -> None:
    job = training()
    job.gone("n0")
    job.gone("n1")
    job.arrive("n2")
    job.elect("n2")
    job.joined("n2")
    assert job.ready("w2@n2") == []
    job.arrive("n0")
    assert job.joined("n0", "w0/0:ready:g0:s0") == ["publish 1: 0=w0 1=w2@n2; initial 0"]


def test_a_start_from_nothing_waits_no_longer_than_for_nodes() -> None:
    job = training()
    job.gone("n0")
    job.gone("n1")
    job.arrive("n2")
    job.elect("n2")
    job.joined("n2")
    job.ready("w2@n2")
    began_s = job.now_s
    until_s = began_s + CONFIG.orphan_timeout_s + CONFIG.quorum_timeout_s
    times = []
    while job.core.phase is Phase.COLLECTING and job.wake_s is not None:
        times.append(job.wake_s)
        job.at(job.wake_s)
    assert times[-1] == until_s
    assert show(job.written[-1]) == ["publish 1: 0=w2@n2; initial 0"]


def test_a_copy_of_an_abandoned_branch_is_none_for_the_next_leader_either() -> None:
    job = training(replace(CONFIG, max_nodes=3), num_nodes=3)
    job.gone("n2")  # with step 41 of generation 0
    job.feed(job.left("w0", 40))
    job.feed(job.left("w1@n1", 40))
    job.enter()
    job.arrive("n2")
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g1:s45")
    job.joined("n1", "w1@n1/0:restored:g1:s45")
    job.joined("n2", "w2@n2/0:ready:g0:s41:live41:undo40")
    held = job.core.extras[Worker("n2", 2)].holdings
    assert held == (Holding(40, "undo", 0),)


def test_nor_is_one_on_a_node_that_the_last_plan_knew_already() -> None:
    standing = Worker("n0", 0)
    plan = Plan(2, (Member(0, Slot("n1", 0), Worker("n1", 1)),), ("h", 1), Cut(CutKind.DISK, 45))
    archive = State(
        CONFIG,
        nodes={"n0": 1, "n1": 1},
        incarnations={"n0": 3, "n1": 2},
        cuts=((1, 40), (2, 45)),
    )
    inventories = [
        ev.NodeJoined("n0", 1, 3, (parse_report("w0/0:ready:g0:s41:live41:undo40"),)),
        ev.NodeJoined("n1", 1, 2, (parse_report("w1@n1/0:restored:g2:s50"),)),
    ]
    resumed = takeover.resume(CONFIG, ch.Published(plan, archive=archive), inventories, [], 0.0)
    assert resumed.state.extras[standing].holdings == (Holding(40, "undo", 0),)
    assert resumed.events == ()


def test_nor_is_it_one_for_the_leader_that_saw_it_come_back() -> None:
    job = training(replace(CONFIG, max_nodes=2), num_nodes=2)
    job.gone("n1")
    job.feed(job.left("w0", 40))
    job.enter()
    job.arrive("n1")
    job.joined("n1", "w1@n1/0:ready:g0:s41:live41")
    job.stepped("w0", 41)
    job.exited("w0")  # the only one that holds anything
    assert job.core.outcome is Outcome.UNRECOVERABLE


@pytest.mark.parametrize(
    ("effect", "outcome", "line"),
    [
        (ev.Close((Worker("n0", 0),)), Outcome.DONE, "close w0 w1@n1"),
        (
            ev.Stop((Worker("n0", 0),), Outcome.DRAINED, "why"),
            Outcome.DRAINED,
            "stop w0 w1@n1 (drained)",
        ),
    ],
)
def test_an_outcome_that_workers_were_told_of_stands(
    effect: ev.Effect, outcome: Outcome, line: str
) -> None:
    """Some of them have left main() already: there is no way back."""
    job = training()
    job.orders.append(ch.Ordered(1, 99, (effect,), {}))
    for word in ("w0", "w1@n1"):
        worker = parse_worker(word)
        told = ev.WorkerFinished(worker, 0, 50, (Holding(50),))
        job.reports.append(job.reported(worker.node, told))
    job.elect("n1")
    job.joined("n0", "w0/0:finished:g0:s50:live50")
    lines = job.joined("n1", "w1@n1/0:finished:g0:s50:live50")
    assert job.core.phase is Phase.CLOSED and job.core.outcome is outcome
    assert lines == [line]
    job.exited("w0", 0)
    assert job.exited("w1@n1", 0) == [f"closed {outcome.value}"]


def test_a_drain_that_was_asked_for_since_the_last_plan_is_not_forgotten() -> None:
    job = training()
    job.report("n0", ev.DrainRequested(15))
    job.elect("n1")
    job.joined("n0", "w0/0:restored:g0:s40")
    job.joined("n1", "w1@n1/0:restored:g0:s40")
    job.feed(job.left("w0", 40))
    assert job.feed(job.left("w1@n1", 40)) == ["stop w0 w1@n1 (drained)"]


def test_an_archive_has_no_times_and_no_members() -> None:
    """Times are of one agent's clock; members are told anew: it does not grow with the world."""
    job = training(replace(CONFIG, max_nodes=3), num_nodes=3)
    job.report("n0", ev.PaceMeasured(0.5))
    job.now_s = 1000.0
    job.exited("w1@n1", 1)
    job.gone("n2")
    job.feed(job.left("w0", 40))
    job.ready("w3@n1")
    assert job.published is not None and job.published.plan.generation == 1
    archive = job.published.archive
    assert archive is not None
    for field in fields(State):
        value = getattr(archive, field.name)
        if field.name.endswith("_s") and field.name != "usual_step_s":
            assert value in (None, 0.0), field.name
        assert not isinstance(value, float) or value < 1000.0, field.name
    assert (archive.plan, archive.roster, archive.extras, archive.stores) == (
        None,
        Roster(),
        {},
        {},
    )
    assert (archive.faults, archive.silent, archive.away) == ((), 0, frozenset())
    assert archive.usual_step_s == 0.5 and archive.cuts == ((0, 0), (1, 40)) and archive.decorated
    assert archive.losses == {"n2": 1} and archive.committed_step == 40
    assert archive.deaths == {Slot("n1", 0): 1}


def test_nothing_of_that_is_archived_whatever_the_state() -> None:
    """Also what a plan's own decision has just cleared."""
    worker = Worker("n0", 0)
    fault = Fault(FaultKind.DIED, worker, 0, 0, 0, 5.0)
    full: dict[str, Any] = {
        "roster": Roster(ready=1),
        "extras": {worker: WorkerState()},
        "stores": {1: ("h", 1)},
        "away": frozenset({"n1"}),
        "silent": 1,
        "look_due": True,
        "unsure": True,
        "looking": worker,
        "faults": (fault,),
        "root_cause": fault,
    }
    times = {f.name for f in fields(State) if f.name.endswith("_s")} - {"usual_step_s"}
    assert times >= {"deadline_s", "drain_by_s", "orphans_until_s", "quorum_by_s"}
    full |= dict.fromkeys(sorted(times), 5.0)
    state = State(CONFIG, **full)
    assert takeover.archive(state) == State(CONFIG)


def test_what_was_counted_goes_on_counting_under_the_next_leader() -> None:
    """The third death of a slot without a step excludes it, whoever leads."""
    job = training(replace(CONFIG, max_barren_generations=9))
    for number, (worker, leader) in enumerate([("w1@n1", "n1"), ("w2@n1", "n0"), ("w3@n1", "n1")]):
        job.exited(worker)
        lines = job.feed(job.left("w0", 40, number))
        if number == 2:
            assert lines == ["publish 3: 0=w0; memory 40 from 0"]
            continue
        job.ready(f"w{number + 2}@n1")
        job.enter()
        job.elect(leader)
        job.joined("n0", f"w0/0:restored:g{number + 1}:s40")
        job.joined("n1", f"w{number + 2}@n1/0:restored:g{number + 1}:s40")
    assert job.core.excluded == {Slot("n1", 0)}
