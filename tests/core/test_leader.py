"""The leader between the stream and the coordinator: what it hears, and what it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import leader as ld
from resilient.core.model import Config, Holding, Outcome, Phase, Plan, Slot, Status, Worker
from resilient.errors import ConfigError
from tests.core.job import CONFIG, Job, show, training
from tests.core.scenario import parse_worker

# ---------------------------------------------------------------- reports


def test_a_report_counts_once_and_only_of_the_incarnation_that_is_there() -> None:
    job = training()
    report = job.reported("n0", ev.WorkerExited(Worker("n0", 0), -9))
    stale = replace(report, incarnation=report.incarnation + 7)
    assert job.feed(stale) == []
    assert job.feed(report) == ["abort 0: w1@n1"]
    num_events = len(job.events)
    job.feed(report)
    assert len(job.events) == num_events


def test_advice_has_no_number_and_is_taken_each_time() -> None:
    job = training()
    incarnation = job.nodes["n0"].incarnation
    for usual_step_s in (0.5, 0.7):
        job.feed(ch.Reported("n0", incarnation, 0, ev.PaceMeasured(usual_step_s)))
        assert job.core.usual_step_s == usual_step_s
    assert job.exited("w0") == ["abort 0: w1@n1"]  # numbers go on from where they were


def test_reports_of_a_node_that_has_not_told_what_it_runs_wait_until_it_has() -> None:
    job = training(replace(CONFIG, max_nodes=3))
    job.arrive("n2")
    worker = Worker("n2", 9)
    assert job.report("n2", ev.WorkerReady(worker)) == []
    assert not [event for event in job.events if event == ev.WorkerReady(worker)]
    job.joined("n2", "w9@n2/0:starting")
    assert [type(event) for event in job.events[-2:]] == [ev.NodeJoined, ev.WorkerReady]


def test_a_node_that_goes_before_it_has_told_anything_is_not_spoken_of() -> None:
    job = training()
    num_events = len(job.events)
    job.arrive("n2")
    job.gone("n2")
    assert len(job.events) == num_events


def test_a_plan_says_which_reports_it_answers() -> None:
    job = training()
    job.exited("w1@n1")
    job.feed(job.left("w0", 40))
    before = {report.node: report.number for report in job.reports}
    job.ready("w2@n1")
    assert job.published is not None
    newest = {"n0": before["n0"], "n1": job.num_reports}
    answered = {node: number for node, (_, number) in job.published.answered.items()}
    assert answered == newest
    assert job.published.incarnations == {"n0": 1, "n1": 2}


# ---------------------------------------------------------------- writing


def test_orders_say_for_which_incarnations_they_are_meant() -> None:
    job = training()
    job.gone("n1")
    job.arrive("n1")
    job.joined("n1", "w1@n1/0:ready:g0:s40:live40")
    assert job.orders[-1].effects == (ev.AbortGeneration(0, (Worker("n0", 0),), "node n1 is lost"),)
    assert job.orders[-1].incarnations == {"n0": 1}
    job.exited("w0")
    start = job.orders[-1]
    assert show(start) == ["start w2 n0/0"] and start.incarnations == {"n0": 1}
    job.ready("w2")
    job.enter()
    job.exited("w1@n1")
    job.feed(job.left("w2", 40, 1))
    assert show(job.orders[-1]) == ["start w3@n1 n1/0"]
    assert job.orders[-1].incarnations == {"n1": 3}


def test_one_write_at_a_time_and_the_same_again_when_it_failed() -> None:
    job = training()
    job.answers = False
    assert job.exited("w0") == []
    (abort,) = job.in_flight
    job.feed(job.left("w1@n1", 40))  # decides more, which waits its turn
    assert job.in_flight == [abort] and len(job.state.queue) == 2  # type: ignore[union-attr]
    job.in_flight.clear()
    job.feed(ld.WriteFailed("no answer"))
    assert job.in_flight == [] and job.wake_s == job.now_s + ld.REPEAT_S
    job.at(job.now_s + ld.REPEAT_S)
    assert job.in_flight == [abort]
    job.answers = True
    assert job.feed(ld.WriteFailed("again")) == []
    job.in_flight.clear()
    assert job.at(job.now_s + ld.REPEAT_S) == ["abort 0: w1@n1", "start w2 n0/0"]
    assert [order.number for order in job.orders[-2:]] == [3, 4]


def test_a_plan_is_written_before_the_orders_that_follow_from_it() -> None:
    job = training(replace(CONFIG, num_spares=1))
    assert show(job.orders[-1]) == ["start w2 spare", "start w3@n1 spare"]
    job.ready("w2", "w3@n1")
    job.exited("w1@n1")
    job.answers = False
    job.feed(job.left("w0", 40))
    (record,) = job.in_flight
    assert isinstance(record, ch.Published)
    for word in ("w0", "w3@n1"):
        worker = parse_worker(word)
        for cls in (ev.WorkerJoined, ev.WorkerRestored):  # as if they had entered unseen
            job.feed(job.reported(worker.node, cls(worker, 1)))
    assert job.core.phase is Phase.RUNNING and job.in_flight == [record]
    job.answers = True
    for event in job.take():
        job.feed(event)
    assert [line for one in job.written[-2:] for line in show(one)] == [
        "publish 1: 0=w0 1=w3@n1; memory 40 from 0",
        "start w4@n1 spare",
    ]


def test_a_kill_is_written_before_the_plan_that_is_decided_with_it() -> None:
    job = training()
    job.report("n1", ev.HealthCheckFailed(Slot("n1", 0), "bad"))
    job.feed(job.left("w0", 40))
    assert job.feed(job.left("w1@n1", 40)) == [
        "kill w1@n1",
        "publish 1: 0=w0; memory 40 from 0",
    ]


@pytest.mark.parametrize(
    "end",
    [
        ld.Refused("not the leader"),
        ch.LeaderChanged("n1", 2),
        ch.LeaderChanged(None, 1),
        ch.LeaderChanged("n0", 2),  # its own next term is led from the beginning
        ch.Closed("over", Outcome.DONE),
    ],
)
def test_who_leads_no_more_writes_nothing_more(end: ld.LeaderEvent) -> None:
    job = training()
    job.answers = False
    job.exited("w0")
    job.feed(job.left("w1@n1", 40))
    assert job.state is not None
    decision = ld.step(job.state, end, job.now_s)
    assert decision.effects == (ld.Stopped(),) and decision.wake_s is None
    later: list[ld.LeaderEvent] = [
        ld.Written(),
        ld.WriteFailed(),
        ld.TimePassed(),
        job.left("w0", 40),
    ]
    for event in later:
        assert ld.step(decision.state, event, 1e6).effects == ()


def test_being_deposed_in_the_middle_of_a_batch_ends_it() -> None:
    job = training()
    assert job.state is not None
    exit_of_w0 = job.reported("n0", ev.WorkerExited(Worker("n0", 0), -9))
    for batch in (
        (ch.LeaderChanged("n1", 2), exit_of_w0),
        (exit_of_w0, ch.LeaderChanged("n1", 2)),
    ):
        decision = ld.step(job.state, ld.Batch(batch), job.now_s)
        assert decision.effects == (ld.Stopped(),)


def test_many_effects_are_many_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ld, "MAX_EFFECTS_PER_ORDER", 3)
    job = Job()
    job.arrive("n0", 5)
    job.arrive("n1", 2)
    job.elect("n0")
    job.joined("n0")
    job.joined("n1")
    assert [(order.number, len(order.effects)) for order in job.orders] == [(1, 3), (2, 3), (3, 1)]
    assert [order.incarnations for order in job.orders] == [
        {"n0": 1},
        {"n0": 1, "n1": 2},
        {"n1": 2},
    ]
    started = [
        e.worker.number for o in job.orders for e in o.effects if isinstance(e, ev.StartWorker)
    ]
    assert started == list(range(7))


def test_time_that_passed_too_early_is_not_told_on() -> None:
    job = training()
    job.exited("w0")
    num_events = len(job.events)
    job.at(job.now_s + 1.0)
    assert len(job.events) == num_events
    assert job.wake_s is not None
    job.at(job.wake_s)
    assert job.events[num_events:] == [ev.TimePassed()]


def test_a_config_that_is_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError):
        ld.initial(Config(min_nodes=3, max_nodes=2), "n0", 1)


# ---------------------------------------------------------------- what many say alike


def member(plan: Plan, rank: int) -> Worker:
    return plan.members[rank].worker


def test_what_many_say_alike_is_told_once_in_the_order_of_each() -> None:
    job = training(replace(CONFIG, max_nodes=5), num_nodes=5)
    plan = job.core.plan
    assert plan is not None
    w = [member(plan, rank) for rank in range(5)]
    out = [ev.WorkerInterrupted(worker, 0, 40, (Holding(40),)) for worker in w]
    told = ld.merged([out[4], out[0], out[1], out[3]], plan)
    assert told == [ev.Alike(out[0], ((0, 1), (3, 4)))]
    other = replace(out[2], step=41)
    assert ld.merged([out[1], other, out[0]], plan) == [ev.Alike(out[0], ((0, 1),)), other]
    steps = [ev.WorkerStepped(worker, 0, 40) for worker in w]
    told = ld.merged([steps[0], out[0], steps[1], out[1]], plan)
    assert told == [ev.Alike(steps[0], ((0, 1),)), ev.Alike(out[0], ((0, 1),))]
    held = replace(out[1], holdings=(Holding(40, "undo"),))
    assert ld.merged([out[0], held], plan) == [out[0], held]


def test_what_is_not_of_this_generation_s_members_is_not_merged() -> None:
    job = training()
    plan = job.core.plan
    older = [ev.WorkerJoined(Worker("n0", 0), 7), ev.WorkerJoined(Worker("n1", 1), 7)]
    assert ld.merged(older, plan) == older
    unknown = [ev.WorkerJoined(Worker("n0", 8), 0), ev.WorkerJoined(Worker("n1", 9), 0)]
    assert ld.merged(unknown, plan) == unknown
    same = [ev.WorkerJoined(Worker("n0", 0), 0), ev.WorkerJoined(Worker("n1", 1), 0)]
    assert ld.merged(same, None) == same


def test_a_batch_is_told_in_its_order_and_its_reports_once() -> None:
    job = training(replace(CONFIG, max_nodes=4), num_nodes=4)
    first = job.reported("n3", ev.WorkerExited(Worker("n3", 3), -9))
    others = [job.left(word, 40) for word in ("w2@n2", "w0", "w1@n1")]
    num_events = len(job.events)
    lines = job.feed(ld.Batch((first, *others)))
    kinds = [type(event) for event in job.events[num_events:]]
    assert kinds == [ev.WorkerExited, ev.Alike]
    assert lines == ["abort 0: w0 w1@n1 w2@n2", "start w4@n3 n3/0"]


def test_members_and_those_who_came_back_without_a_rank_may_say_alike() -> None:
    """n0's worker has the place of a rank no more, though it says the same as the others."""
    job = training(replace(CONFIG, max_nodes=3), num_nodes=3)
    job.gone("n0")
    job.arrive("n0")
    job.joined("n0", "w0/0:restored:g0:s40")
    batch = tuple(job.left(word, 40) for word in ("w0", "w1@n1", "w2@n2"))
    lines = job.feed(ld.Batch(batch))
    assert lines == ["publish 1: 0=w0 1=w1@n1 2=w2@n2; memory 40 from 0,1,2"]


def test_a_node_that_is_told_of_again_is_the_same_one() -> None:
    """Its inventory and its numbers stand: else no report of it would count, or one twice."""
    job = training()
    assert job.feed(job.nodes["n0"]) == []
    report = job.reported("n0", ev.WorkerExited(Worker("n0", 0), -9))
    assert job.feed(report) == ["abort 0: w1@n1"]
    job.feed(job.nodes["n0"])
    num_events = len(job.events)
    job.feed(report)
    assert len(job.events) == num_events


def test_a_plan_does_not_answer_what_came_with_the_report_that_led_to_it() -> None:
    """A report that is read and not decided about would be lost with this leader."""
    job = training()
    job.exited("w1@n1")
    job.feed(job.left("w0", 40))
    assert job.core is not None
    (slot,) = [w for w in job.core.extras if w.node == "n1"]
    ready = job.reported("n1", ev.WorkerReady(slot))
    drain = job.reported("n0", ev.DrainRequested(15))
    job.feed(ld.Batch((ready, drain)))
    assert job.published is not None and job.published.plan.generation == 1
    assert job.published.answered["n0"][1] < drain.number
    assert job.published.answered["n1"][1] == ready.number


def test_a_leader_does_not_wait_for_ever_for_a_node_that_only_renews_its_lease() -> None:
    job = training()
    job.elect("n1")
    job.joined("n1", "w1@n1/0:restored:g0:s40")
    assert job.state is not None and job.state.job is None
    assert job.wake_s == job.now_s + ld.LISTEN_S
    lines = job.at(job.now_s + ld.LISTEN_S)
    assert job.core is not None  # and without n0 it goes on
    assert lines[0] == "abort 0: w1@n1"


def test_bounds_count_from_when_the_agents_can_know() -> None:
    """An abort that could not be written makes nobody late."""
    job = training()
    job.answers = False
    job.feed(job.left("w0", 40))
    assert job.core is not None and job.core.deadline_s == job.now_s + 5.0
    start_s = job.now_s
    job.at(start_s + 4.0)
    for answer in job.take():
        job.feed(answer)
    job.answers = True
    assert job.core.deadline_s == start_s + 9.0
    assert job.at(start_s + 5.0) == []
    assert job.at(start_s + 9.0) != []


def test_what_comes_with_an_inventory_is_of_those_it_tells_of() -> None:
    """The reports behind it are of workers without a rank, which speak for themselves."""
    job = training(replace(CONFIG, max_nodes=3), num_nodes=3)
    job.gone("n1")
    job.gone("n2")
    job.feed(job.left("w0", 40))
    for node in ("n1", "n2"):
        job.arrive(node)
    words = {"n1": "w1@n1/0:restored:g0:s41", "n2": "w2@n2/0:restored:g0:s41"}
    joined = [job.reported(node, job.inventory(node, word)) for node, word in words.items()]
    reports = [job.left(word, 41) for word in ("w1@n1", "w2@n2")]
    job.feed(ld.Batch((*joined, *reports)))
    assert job.core is not None
    told = [known.status for worker, known in job.core.extras.items() if worker.node != "n0"]
    assert Status.RESTORED not in told


def test_the_next_leader_knows_that_the_script_is_decorated() -> None:
    """Whoever told of it may be gone before the first plan."""
    job = Job(CONFIG)
    job.arrive("n0")
    job.arrive("n1")
    job.elect("n0")
    job.joined("n0")
    job.joined("n1")
    job.report("n0", ev.WorkerReady(Worker("n0", 0)))
    assert any(order.decorated for order in job.orders)
    job.gone("n0")
    job.elect("n1")
    job.joined("n1", "w1@n1/0:starting")
    assert job.core is not None and job.core.decorated
