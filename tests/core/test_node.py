"""The agent's own machine: reports until a plan answers them, the lease, fencing itself."""

from __future__ import annotations

import pytest

from resilient.core import events as ev
from resilient.core import node as n
from resilient.core.model import Cut, CutKind, Member, Plan, Slot, Worker
from resilient.errors import ConfigError

CONFIG = n.NodeConfig("n0", 2, repeat_s=1.0, fence_margin_s=2.0)
EXIT = ev.WorkerExited(Worker("n0", 1), -9, step=7)
STEPPED = ev.WorkerStepped(Worker("n0", 0), 0, 1)


def plan(generation: int, *nodes: str) -> Plan:
    members = tuple(
        Member(rank, Slot(node, 0), Worker(node, rank)) for rank, node in enumerate(nodes)
    )
    return Plan(generation, members, ("h", 1), Cut(CutKind.INITIAL, 0))


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

    def at(self, now_s: float) -> list[n.NodeEffect]:
        self.now_s = now_s
        return self.tell(n.TimePassed())


def test_a_report_is_sent_at_once_and_again_until_it_is_stored() -> None:
    agent = Agent()
    assert agent.tell(n.Seen(EXIT)) == [n.SendReport(1, EXIT)]
    assert agent.wake_s == 1.0
    assert agent.at(0.5) == []
    assert agent.at(1.0) == [n.SendReport(1, EXIT)]
    assert agent.tell(n.Stored(1)) == []
    assert agent.wake_s is None
    assert agent.at(9.0) == []


def test_a_report_is_kept_until_a_plan_answers_it() -> None:
    agent = Agent()
    agent.tell(n.Seen(STEPPED))
    agent.tell(n.Seen(EXIT))
    agent.tell(n.Stored(1))
    agent.tell(n.Stored(2))
    assert [r.number for r in agent.state.outbox] == [1, 2]
    effects = agent.tell(n.PlanSeen(plan(1, "n0", "n1"), answered=1))
    assert effects == [n.Forget(1), n.EnterGeneration(plan(1, "n0", "n1"))]
    assert [r.number for r in agent.state.outbox] == [2]


def test_a_new_incarnation_tells_everything_unanswered_anew() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Seen(EXIT))
    agent.tell(n.Stored(1))
    assert agent.tell(n.LeaseLost()) == [n.Register("n0", 2)]
    assert agent.tell(n.Seen(STEPPED)) == []  # nowhere to tell it to
    effects = agent.tell(n.Registered(2, 30.0))
    assert effects == [n.Campaign(), n.SendReport(1, EXIT), n.SendReport(2, STEPPED)]


def test_advice_is_told_once() -> None:
    agent = Agent()
    pace = ev.PaceMeasured(0.5)
    assert agent.tell(n.Seen(pace)) == [n.SendReport(0, pace)]
    assert agent.state.outbox == ()


def test_a_plan_is_entered_once() -> None:
    agent = Agent()
    assert agent.tell(n.PlanSeen(plan(1, "n0"))) == [n.EnterGeneration(plan(1, "n0"))]
    assert agent.tell(n.PlanSeen(plan(1, "n0"))) == []
    assert agent.tell(n.PlanSeen(plan(0, "n0"))) == []
    assert agent.tell(n.PlanSeen(plan(2, "n1"))) == []  # stands by


def test_leadership_comes_and_goes() -> None:
    agent = Agent()
    assert agent.tell(n.Elected(3)) == [n.Lead(3)]
    assert agent.tell(n.Deposed()) == [n.StepDown(), n.Campaign()]
    assert agent.tell(n.Deposed()) == []


def test_alone_in_its_generation_it_stops_before_the_lease_ends() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Elected(1))
    agent.tell(n.PlanSeen(plan(0, "n0", "n0")))
    assert agent.wake_s == 8.0
    assert agent.at(7.9) == []
    assert agent.at(8.0) == [n.StepDown(), n.Fence(0, "the lease is ending")]
    assert agent.at(9.0) == []
    assert agent.tell(n.PlanSeen(plan(1, "n0"))) == []  # enters nothing
    agent.tell(n.LeaseLost())
    agent.tell(n.Registered(2, 60.0))
    assert agent.tell(n.PlanSeen(plan(2, "n0"))) == [n.EnterGeneration(plan(2, "n0"))]


def test_among_others_it_goes_on_until_it_sees_a_fault() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.Elected(1))
    agent.tell(n.PlanSeen(plan(0, "n0", "n1")))
    assert agent.at(8.0) == [n.StepDown()]
    assert agent.at(300.0) == []
    effects = agent.tell(n.Seen(EXIT))
    assert n.Fence(0, "a fault while the lease could not be renewed") in effects


def test_a_renewal_moves_the_end_and_a_late_one_unfences() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.PlanSeen(plan(0, "n0")))
    agent.now_s = 5.0
    agent.tell(n.Renewed(15.0))
    assert agent.wake_s == 13.0
    assert agent.at(13.0) == [n.Fence(0, "the lease is ending")]
    agent.now_s = 14.0
    assert agent.tell(n.Renewed(23.0)) == [n.Campaign()]
    assert agent.tell(n.PlanSeen(plan(1, "n0"))) == [n.EnterGeneration(plan(1, "n0"))]


def test_elected_without_a_lease_it_does_not_lead() -> None:
    agent = Agent(ends_s=10.0)
    agent.now_s = 9.0
    assert n.Lead(1) not in agent.tell(n.Elected(1))


def test_a_lease_without_end_is_never_fenced() -> None:
    agent = Agent(ends_s=None)
    agent.tell(n.PlanSeen(plan(0, "n0")))
    assert agent.at(1e9) == [] and agent.wake_s is None


def test_after_the_end_nothing_is_done() -> None:
    agent = Agent(ends_s=10.0)
    agent.tell(n.JobClosed())
    assert agent.tell(n.Seen(EXIT)) == [] and agent.wake_s is None


@pytest.mark.parametrize("config", [{"num_slots": 0}, {"repeat_s": 0.0}, {"fence_margin_s": -1.0}])
def test_a_config_out_of_range_is_refused(config: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        n.initial(n.NodeConfig(**{"node": "n0", "num_slots": 1, **config}))  # type: ignore[arg-type]
