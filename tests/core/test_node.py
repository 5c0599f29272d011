"""The agent's own machine: reports until a plan answers them, the lease, fencing itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import node as n
from resilient.core.model import (
    Cut,
    CutKind,
    Holding,
    Member,
    Outcome,
    Plan,
    Slot,
    Status,
    Worker,
    WorkerReport,
)
from resilient.errors import ConfigError

CONFIG = n.NodeConfig("n0", 2, repeat_s=1.0, fence_margin_s=2.0)
EXIT = ev.WorkerExited(Worker("n0", 1), -9, step=7)
STEPPED = ev.WorkerStepped(Worker("n0", 0), 0, 1)


def plan(generation: int, *nodes: str) -> Plan:
    members = tuple(
        Member(rank, Slot(node, 0), Worker(node, rank)) for rank, node in enumerate(nodes)
    )
    return Plan(generation, members, ("h", 1), Cut(CutKind.INITIAL, 0))


def published(plan: Plan, answered: int = 0, inc: int = 1) -> n.Changed:
    return n.Changed(ch.Published(plan, {"n0": (inc, answered)}, {"n0": inc}))


def ordered(*effects: ev.Effect, term: int = 1, number: int = 1) -> n.Changed:
    return n.Changed(ch.Ordered(term, number, effects, {"n0": 1}))


LEFT = n.Seen(ev.WorkerInterrupted(Worker("n0", 0), 0, 5, (Holding(5),)))
LATE = "did not leave its generation in time"
W0, W1, OTHER = Worker("n0", 0), Worker("n0", 1), Worker("n1", 1)


def inventory(effect: n.NodeEffect) -> ev.NodeJoined:
    """The last report of what was sent."""
    assert isinstance(effect, n.SendReports)
    event = effect.reports[-1][1]
    assert isinstance(event, ev.NodeJoined)
    return event


class Agent:
    def __init__(self, *, ends_s: float | None = None) -> None:
        decision = n.initial(CONFIG)
        assert decision.effects == (n.Register("n0", 2),)
        self.state, self.now_s, self.wake_s = decision.state, 0.0, decision.wake_s
        assert self.tell(n.Registered(1, ends_s)) == [n.Campaign()]

    def tell(self, event: n.NodeEvent) -> list[n.NodeEffect]:
        decision = n.step(self.state, event, self.now_s)
        assert decision == n.step(self.state, event, self.now_s)
        assert decision.reason
        self.state, self.wake_s = decision.state, decision.wake_s
        assert self.wake_s is None or self.wake_s > self.now_s, "it would spin"
        return list(decision.effects)

    def enter(self, plan: Plan) -> None:
        """Its members are started, reach the decorator, and enter."""
        members = [m for m in plan.members if m.slot.node == "n0"]
        for member in members:
            start = ev.StartWorker(member.worker, member.slot)
            self.tell(ordered(start, number=self.state.last_order[1] + 1))
            self.tell(n.Seen(ev.WorkerReady(member.worker)))
        assert self.tell(published(plan, self.state.next_number)) == [
            n.Forget(self.state.next_number),
            n.EnterGeneration(plan),
        ]

    def at(self, now_s: float) -> list[n.NodeEffect]:
        self.now_s = now_s
        return self.tell(n.TimePassed())

    def store(self) -> None:
        """The rendezvous takes in all that was reported."""
        for report in self.state.outbox:
            self.tell(n.Stored(report.number))


def test_a_report_is_sent_at_once_and_again_until_it_is_stored() -> None:
    agent = Agent()
    assert agent.tell(n.Seen(EXIT)) == [n.SendReports(((1, EXIT),))]
    assert agent.wake_s == 1.0
    assert agent.at(0.5) == []
    assert agent.at(1.0) == [n.SendReports(((1, EXIT),))]
    assert agent.tell(n.Stored(1)) == []
    assert agent.wake_s is None
    assert agent.at(9.0) == []


def test_reports_go_one_request_at_a_time_and_cannot_overtake() -> None:
    agent = Agent()
    assert agent.tell(n.Seen(STEPPED)) == [n.SendReports(((1, STEPPED),))]
    assert agent.tell(n.Seen(EXIT)) == []
    assert agent.tell(n.Stored(1)) == [n.SendReports(((2, EXIT),))]
    assert agent.tell(n.Seen(STEPPED)) == []
    both = n.SendReports(((2, EXIT), (3, STEPPED)))
    assert agent.at(1.0) == [both]  # what may be on its way still is in it, too


def test_orders_to_a_former_life_are_none_of_this_one() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 30.0))
    start = ev.StartWorker(W0, Slot("n0", 0))
    assert agent.tell(ordered(start)) == []
    reborn = n.initial(CONFIG).state  # reads the stream before it is registered
    for order in (ordered(start), n.Changed(ch.Ordered(1, 2, (start,)))):
        assert n.step(reborn, order, 0.0).effects == ()


def test_a_report_is_kept_until_a_plan_answers_it() -> None:
    agent = Agent()
    agent.tell(n.Seen(STEPPED))
    agent.tell(n.Seen(EXIT))
    agent.tell(n.Stored(1))
    agent.tell(n.Stored(2))
    assert [r.number for r in agent.state.outbox] == [1, 2]
    effects = agent.tell(published(plan(1, "n0", "n1"), 1))
    assert effects == [n.Forget(1), n.EnterGeneration(plan(1, "n0", "n1"))]
    assert [r.number for r in agent.state.outbox] == [2]


def test_a_new_incarnation_tells_what_it_runs_and_what_the_node_was_asked() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Changed(ch.LeaderChanged("n1", 1)))
    drain = ev.DrainRequested(15)
    agent.tell(n.Seen(drain))
    agent.tell(n.Seen(EXIT))
    agent.tell(n.Stored(1))
    assert agent.tell(n.LeaseLost()) == [n.Register("n0", 2)]
    assert agent.tell(n.Seen(STEPPED)) == []  # nowhere to tell it to
    effects = agent.tell(n.Registered(2, 30.0))
    assert effects[0] == n.Campaign()
    told = [event for e in effects if isinstance(e, n.SendReports) for _, event in e.reports]
    assert told == [drain, ev.NodeJoined("n0", 2, 2, (), 1)]


def test_each_leader_is_told_what_the_node_runs() -> None:
    agent = Agent(ends_s=1e6)
    first = agent.tell(n.Changed(ch.LeaderChanged("n1", 1)))
    assert first == [n.SendReports(((1, ev.NodeJoined("n0", 2, 1, (), 1)),))]
    agent.store()
    assert agent.tell(n.Changed(ch.LeaderChanged("n1", 1))) == []
    agent.enter(plan(0, "n0", "n1"))
    agent.tell(n.Seen(ev.WorkerJoined(W0, 0)))
    agent.tell(n.Seen(ev.WorkerRestored(W0, 0)))
    agent.tell(ordered(ev.StartWorker(Worker("n0", 7), None), number=9))
    agent.store()
    (effect,) = agent.tell(n.Changed(ch.LeaderChanged("n2", 2)))
    joined = inventory(effect)
    assert joined.term == 2
    assert joined.workers == (
        WorkerReport(W0, Status.RESTORED, Slot("n0", 0), 0),
        WorkerReport(Worker("n0", 7), Status.STARTING),
    )
    held = (Holding(5), Holding(4, "undo", 0))
    agent.tell(n.Seen(ev.WorkerInterrupted(W0, 3, 5, held)))
    agent.store()
    (effect,) = agent.tell(n.Changed(ch.LeaderChanged("n1", 3)))
    joined = inventory(effect)
    left = WorkerReport(W0, Status.READY, Slot("n0", 0), 3, 5, (Holding(5, "live", 3), held[1]))
    assert joined.workers[0] == left


def test_an_order_is_carried_out_once_and_only_by_those_it_concerns() -> None:
    agent = Agent()
    start = ev.StartWorker(W0, Slot("n0", 0))
    assert agent.tell(ordered(start, ev.StartWorker(OTHER, Slot("n1", 0)))) == [n.CarryOut(start)]
    assert agent.tell(ordered(start)) == []
    assert agent.tell(ordered(start, number=2)) == []  # it runs already
    abort = ev.AbortGeneration(0, (W0, OTHER), "why")
    mine = n.CarryOut(ev.AbortGeneration(0, (W0,), "why"))
    assert agent.tell(ordered(abort, number=3)) == [mine]
    agent.tell(n.Changed(ch.LeaderChanged("n1", 5)))
    assert agent.tell(ordered(ev.KillWorker(W0, "why"), term=4, number=9)) == []  # deposed


def test_without_a_lease_nothing_is_persisted() -> None:
    agent = Agent(ends_s=10.0)
    persist = ev.Persist(W0, 5)
    assert agent.tell(ordered(persist, number=1)) == [n.CarryOut(persist)]
    agent.now_s = 9.0
    assert agent.tell(ordered(persist, number=2)) == []


def test_an_abort_that_comes_before_the_entry_is_answered_at_once() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.tell(n.Seen(ev.WorkerInterrupted(W0, 0, 5, (Holding(5),))))
    agent.store()
    agent.now_s = 8.5
    assert agent.tell(published(plan(1, "n0", "n1"))) == []
    agent.tell(ordered(ev.AbortGeneration(1, (W0,), "late"), number=5))
    effects = agent.tell(n.Renewed(18.0))
    assert not [e for e in effects if isinstance(e, n.EnterGeneration)]
    left = ev.WorkerInterrupted(W0, 1, 5, (Holding(5, "live", 0),))
    assert agent.state.outbox[-1].event == left


def test_advice_is_told_once() -> None:
    agent = Agent()
    pace = ev.PaceMeasured(0.5)
    assert agent.tell(n.Seen(pace)) == [n.Advise(pace)]
    assert agent.state.outbox == ()


def test_a_plan_is_entered_once() -> None:
    agent = Agent()
    assert agent.tell(published(plan(1, "n0"))) == [n.EnterGeneration(plan(1, "n0"))]
    assert agent.tell(published(plan(1, "n0"))) == []
    assert agent.tell(published(plan(0, "n0"))) == []
    assert agent.tell(published(plan(2, "n1"))) == []  # stands by


def test_leadership_comes_and_goes() -> None:
    agent = Agent()
    assert agent.tell(n.Elected(3)) == [n.Lead(3)]
    agent.tell(n.Changed(ch.LeaderChanged("n0", 3)))
    agent.store()
    assert agent.tell(n.Changed(ch.LeaderChanged(None, 3))) == [n.StepDown(), n.Campaign()]
    assert agent.tell(n.Changed(ch.LeaderChanged(None, 3))) == []


def test_alone_in_its_generation_it_stops_before_the_lease_ends() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Elected(1))
    agent.enter(plan(0, "n0", "n0"))
    assert agent.wake_s == 8.0
    assert agent.at(7.9) == []
    assert agent.at(8.0) == [n.StepDown(), n.Fence(0, "the lease is ending")]
    agent.tell(LEFT)
    agent.store()
    late = n.CarryOut(ev.KillWorker(W1, LATE))
    assert agent.wake_s == 9.0
    assert agent.at(9.0) == [late]
    assert agent.at(9.5) == []
    assert agent.tell(published(plan(1, "n0"))) == []  # enters nothing
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 60.0))
    assert agent.tell(published(plan(2, "n0"))) == []  # meant for its former life
    assert agent.tell(published(plan(3, "n0"), inc=2)) == [n.EnterGeneration(plan(3, "n0"))]


def test_among_others_it_goes_on_until_it_sees_a_fault() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Elected(1))
    agent.enter(plan(0, "n0", "n1"))
    assert agent.at(8.0) == [n.StepDown()]
    assert agent.at(300.0) == []
    effects = agent.tell(n.Seen(EXIT))
    assert n.Fence(0, "a fault while the lease could not be renewed") in effects
    agent.store()
    assert agent.wake_s == 305.0
    assert agent.at(305.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]


def test_among_others_it_goes_on_no_longer_than_orphans_may() -> None:
    """All of its peers may be cut off with it, and others have begun anew without them."""
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    assert agent.at(309.9) == []
    assert agent.at(310.0) == [n.Fence(0, "without a lease for too long")]


def test_registered_anew_it_leaves_what_it_was_in() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.now_s = 11.0
    agent.tell(n.LeaseLost())
    assert n.Fence(0, "registered anew") in agent.tell(n.Registered(2, 21.0))
    agent.tell(LEFT)
    agent.store()
    assert agent.at(16.0) == [] and not agent.state.fenced


def test_a_renewal_moves_the_end_and_a_late_one_unfences() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    agent.now_s = 5.0
    agent.tell(n.Renewed(15.0))
    assert agent.wake_s == 13.0
    assert agent.at(13.0) == [n.Fence(0, "the lease is ending")]
    agent.tell(LEFT)
    agent.store()
    agent.now_s = 14.0
    assert agent.tell(n.Renewed(23.0)) == [n.Campaign()]
    assert agent.tell(published(plan(1, "n0"))) == [n.EnterGeneration(plan(1, "n0"))]


def test_elected_without_a_lease_it_does_not_lead() -> None:
    agent = Agent(ends_s=10.0)
    agent.now_s = 9.0
    assert n.Lead(1) not in agent.tell(n.Elected(1))


def test_a_lease_without_end_is_never_fenced() -> None:
    agent = Agent(ends_s=None)
    agent.tell(published(plan(0, "n0")))
    assert agent.at(1e9) == [] and agent.wake_s is None


def test_after_the_end_nothing_is_done() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Changed(ch.Closed("over", Outcome.DONE)))
    assert agent.tell(n.Seen(EXIT)) == [] and agent.wake_s is None


@pytest.mark.parametrize("config", [{"num_slots": 0}, {"repeat_s": 0.0}, {"fence_margin_s": -1.0}])
def test_a_config_out_of_range_is_refused(config: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        n.initial(n.NodeConfig(**{"node": "n0", "num_slots": 1, **config}))  # type: ignore[arg-type]


# ---------------------------------------------------------------- found by the simulator


def test_who_was_frozen_beyond_the_lease_is_given_the_time_to_come_out() -> None:
    """The deadline has been missed in any case: what the workers hold is worth more than haste."""
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    agent.store()
    assert agent.at(24.0) == [n.Fence(0, "the lease is ending")]
    assert agent.wake_s == 24.0 + CONFIG.interrupt_timeout_s
    assert agent.at(28.9) == []
    assert agent.at(29.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]


def test_a_fence_just_before_the_deadline_of_its_kills_keeps_it() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    agent.store()
    assert agent.at(8.9) == [n.Fence(0, "the lease is ending")]
    assert agent.at(9.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]


def test_the_newest_generation_is_fenced() -> None:
    """One that does not die is inside an old one still: to fence that one would stop nobody."""
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.tell(ordered(ev.StartWorker(Worker("n0", 2), Slot("n0", 1)), number=5))
    agent.tell(n.Seen(ev.WorkerReady(Worker("n0", 2))))
    newer = replace(plan(1, "n0"), members=(Member(0, Slot("n0", 1), Worker("n0", 2)),))
    agent.tell(published(newer))
    agent.store()
    inside = {worker: known.generation for worker, known in agent.state.workers.items()}
    assert inside == {W0: 0, Worker("n0", 2): 1}
    assert agent.at(8.0) == [n.Fence(1, "the lease is ending")]
    late = [n.CarryOut(ev.KillWorker(worker, LATE)) for worker in (W0, Worker("n0", 2))]
    assert agent.at(9.0) == late


KILL, PERSIST = ev.KillWorker(W0, "did not leave"), ev.Persist(W0, 5)
LOOK, START = ev.Look(W0), ev.StartWorker(Worker("n0", 9), None)


def test_orders_that_come_while_the_lease_ends_wait_for_its_renewal() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.store()
    agent.now_s = 8.5
    order = ordered(KILL, PERSIST, LOOK, START, ev.DumpStacks((W0,)), number=5)
    assert agent.tell(order) == [n.CarryOut(ev.DumpStacks((W0,)))]
    assert agent.tell(order) == []
    effects = agent.tell(n.Renewed(18.0))
    late = [n.CarryOut(KILL), n.CarryOut(PERSIST), n.CarryOut(LOOK), n.CarryOut(START)]
    assert effects == [n.Campaign(), *late]
    assert Worker("n0", 9) in agent.state.workers
    assert agent.tell(n.Renewed(19.0)) == []  # once


@pytest.mark.parametrize("lost", [False, True])
def test_orders_that_come_after_the_lease_has_ended_are_never_carried_out(lost: bool) -> None:
    """A link that comes back first brings what was ordered before this node was given up: whoever
    leads now asks for what it runs, and decides anew. A kill would hit the only copy."""
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    assert n.Fence(0, "the lease is ending") in agent.at(8.0)
    agent.tell(LEFT)
    agent.store()
    agent.now_s = 300.0
    if lost:
        agent.tell(n.LeaseLost())
    assert agent.tell(ordered(KILL, START, PERSIST, number=5)) == []
    if not lost:
        gone = agent.tell(n.Changed(ch.NodeGone("n0", 1)))
        assert n.Register("n0", 2) in gone
    effects = agent.tell(n.Registered(2, 330.0))
    assert not [effect for effect in effects if isinstance(effect, n.CarryOut)]
    effects = agent.tell(n.Renewed(340.0))
    assert not [effect for effect in effects if isinstance(effect, n.CarryOut)]
    assert W0 in agent.state.workers and Worker("n0", 9) not in agent.state.workers


def test_an_abort_needs_no_lease() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.now_s = 50.0
    abort = ev.AbortGeneration(0, (W0,), "why")
    assert n.CarryOut(abort) in agent.tell(ordered(abort, number=5))


def test_a_term_is_led_once() -> None:
    agent = Agent(ends_s=10.0)
    assert n.Lead(3) in agent.tell(n.Elected(3))
    assert agent.tell(n.Elected(3)) == []
    agent.tell(n.Changed(ch.LeaderChanged("n0", 3)))
    assert n.StepDown() in agent.at(8.0)
    agent.tell(n.Renewed(20.0))
    agent.tell(n.Changed(ch.LeaderChanged(None, 4)))
    assert n.Lead(3) not in agent.tell(n.Elected(3))


def test_the_end_of_its_own_lease_in_the_stream_is_its_end() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Elected(1))
    assert agent.tell(n.Changed(ch.NodeGone("n1", 1))) == []
    assert agent.tell(n.Changed(ch.NodeGone("n0", 7))) == []  # of another incarnation
    assert agent.tell(n.Changed(ch.NodeGone("n0", 1))) == [n.StepDown(), n.Register("n0", 2)]
    assert agent.tell(n.LeaseLost()) == []  # it knows
    assert agent.tell(n.Renewed(99.0)) == []  # an answer that comes too late


def test_an_inventory_has_what_is_on_disk_and_whether_the_script_is_decorated() -> None:
    agent = Agent(ends_s=1e6)
    agent.tell(ordered(ev.StartWorker(W0, Slot("n0", 0))))
    first = inventory(agent.tell(n.Changed(ch.LeaderChanged("n1", 1)))[-1])
    assert (first.persisted_step, first.decorated) == (None, False)
    agent.store()
    agent.tell(n.Seen(ev.WorkerReady(W0, 20)))
    agent.tell(n.Seen(ev.Persisted(W0, 40)))
    agent.tell(n.Seen(ev.WorkerExited(W0, -9, 35, persisted_step=30)))
    agent.store()
    second = inventory(agent.tell(n.Changed(ch.LeaderChanged("n0", 2)))[-1])
    assert (second.persisted_step, second.decorated, second.workers) == (40, True, ())


def test_a_member_that_stands_by_without_a_lease_enters_when_it_has_one_again() -> None:
    agent = Agent(ends_s=10.0)
    agent.now_s = 8.5
    assert agent.tell(published(plan(0, "n0", "n1"))) == []
    effects = agent.tell(n.Renewed(18.0))
    assert effects == [n.Campaign(), n.EnterGeneration(plan(0, "n0", "n1"))]


def test_the_end_of_the_job_is_told_once() -> None:
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    closed = n.Changed(ch.Closed("over", Outcome.DRAINED))
    assert agent.tell(closed) == [n.End("over", Outcome.DRAINED)]
    assert agent.tell(closed) == [] and agent.at(8.0) == []
    assert agent.tell(ordered(KILL, number=9)) == []


def test_a_plan_for_its_former_life_is_not_entered() -> None:
    """It was decided before anybody knew that this agent came back."""
    agent = Agent(ends_s=10.0)
    agent.enter(plan(0, "n0"))
    agent.tell(LEFT)
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 60.0))
    agent.store()
    assert agent.tell(published(plan(1, "n0"), inc=1)) == []
    assert agent.tell(published(plan(2, "n0"), inc=2)) == [n.EnterGeneration(plan(2, "n0"))]


@pytest.mark.parametrize("nodes", [("n0",), ("n1",)])
def test_a_newer_plan_ends_the_generation_before_it(nodes: tuple[str, ...]) -> None:
    """Whoever reads that there is a newer one has the proof that its own is over."""
    agent = Agent()
    agent.enter(plan(0, "n0", "n1"))
    effects = agent.tell(published(plan(1, *nodes)))
    assert effects[0] == n.Fence(0, "a newer generation has begun")
    assert agent.state.workers[W0].generation == 0  # it has not entered anything
    assert agent.at(5.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]


def test_who_stays_in_an_older_generation_is_killed_whatever_others_enter() -> None:
    agent = Agent(ends_s=100.0)
    agent.enter(plan(0, "n0", "n0"))
    agent.now_s = 1.0
    agent.tell(n.LeaseLost())
    assert n.Fence(0, "registered anew") in agent.tell(n.Registered(2, 100.0))
    agent.tell(LEFT)
    agent.store()
    agent.tell(published(plan(1, "n0"), inc=2))
    assert agent.state.workers[W0].generation == 1
    assert agent.at(6.0) == [n.CarryOut(ev.KillWorker(W1, LATE))]


def test_what_a_plan_answers_is_of_one_incarnation() -> None:
    """Numbers begin anew with an agent: those of a former life answer nothing of this one."""
    agent = Agent()
    agent.tell(n.Seen(STEPPED))
    answered = {"n0": (9, 40)}
    agent.tell(n.Changed(ch.Published(plan(1, "n1"), answered, {"n1": 2})))
    assert [report.number for report in agent.state.outbox] == [1]


def test_deferred_orders_end_with_the_term_that_gave_them() -> None:
    """The next leader is told what runs here, and decides from that."""
    agent = Agent(ends_s=10.0)
    agent.tell(n.Changed(ch.LeaderChanged("n1", 1)))
    agent.now_s = 8.5
    agent.tell(ordered(ev.StartWorker(W0, Slot("n0", 0))))
    agent.tell(n.Changed(ch.LeaderChanged("n2", 2)))
    effects = agent.tell(n.Renewed(20.0))
    assert not [effect for effect in effects if isinstance(effect, n.CarryOut)]


def test_long_steps_have_longer_to_come_out() -> None:
    agent = Agent(ends_s=100.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.tell(n.Seen(ev.PaceMeasured(30.0)))
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 100.0))
    agent.store()
    assert agent.at(89.0) == []
    agent.tell(n.Renewed(200.0))
    assert agent.at(90.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]


def test_who_does_not_end_after_a_kill_is_reported() -> None:
    """Nobody watches it any more, and a leader would take it for one that restores."""
    agent = Agent(ends_s=100.0)
    agent.enter(plan(0, "n0", "n1"))
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 100.0))
    agent.store()
    assert agent.at(5.0) == [n.CarryOut(ev.KillWorker(W0, LATE))]
    (effect,) = agent.at(10.0)
    assert isinstance(effect, n.SendReports)
    hung = effect.reports[-1][1]
    assert isinstance(hung, ev.WorkersHung)
    assert (hung.generation, hung.workers) == (0, (W0,))
    agent.store()
    assert agent.at(50.0) == []
