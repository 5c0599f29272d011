"""A rendezvous in small, for tests of the leader and of those who take over from it.

`Job` keeps what a real rendezvous keeps, gives it to each new leader from the beginning, answers
its writes and opens its stores. The tests are the agents: they say what a node tells, in the words
of scenario.py.
"""

from __future__ import annotations

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core import leader as ld
from resilient.core.model import Config, Holding, Phase, State
from tests.core.scenario import parse_report, parse_worker, show_effect

CONFIG = Config(min_nodes=1, max_nodes=2, num_spares=0)


def show(record: ld.Record) -> list[str]:
    match record:
        case ch.Published(plan):
            return [show_effect(ev.PublishPlan(plan))]
        case ch.Ordered(_, _, effects):
            return [show_effect(effect) for effect in effects]
        case ch.Closed(_, outcome):
            return [f"closed {outcome.value if outcome else None}"]
    raise AssertionError(record)


class Job:
    """A rendezvous's content, and the leader that reads its stream and writes to it."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.config = config
        self.now_s = 0.0
        self.wake_s: float | None = None
        self.nodes: dict[str, ch.NodeArrived] = {}
        self.num_incarnations = 0
        self.term = 0
        self.published: ch.Published | None = None
        self.orders: list[ch.Ordered] = []  # those before the last plan but one are dropped
        self.num_old = 0  # of them, those before the last plan
        self.reports: list[ch.Reported] = []
        self.num_reports = 0
        self.state: ld.LeaderState | None = None
        self.answers = True  # False: writes stay in flight, until the test answers
        self.in_flight: list[ld.Record] = []
        self.written: list[ld.Record] = []
        self.events: list[ev.Event] = []  # that the coordinator was fed
        self.opened: list[int] = []

    @property
    def core(self) -> State:
        assert self.state is not None and self.state.job is not None
        return self.state.job

    # ------------------------------------------------------------ the stream

    def arrive(self, node: str, num_slots: int = 1) -> list[str]:
        self.num_incarnations += 1
        self.nodes[node] = ch.NodeArrived(node, self.num_incarnations, num_slots)
        return self.feed(self.nodes[node])

    def gone(self, node: str, *, certain: bool = False) -> list[str]:
        incarnation = self.nodes.pop(node).incarnation
        self.reports = [report for report in self.reports if report.node != node]
        return self.feed(ch.NodeGone(node, incarnation, certain))

    def report(self, node: str, event: ev.Event) -> list[str]:
        return self.feed(self.reported(node, event))

    def reported(self, node: str, event: ev.Event) -> ch.Reported:
        self.num_reports += 1
        incarnation = self.nodes[node].incarnation
        report = ch.Reported(node, incarnation, self.num_reports, event)
        self.reports.append(report)
        return report

    def inventory(self, node: str, *words: str, decorated: bool = False) -> ev.NodeJoined:
        arrived = self.nodes[node]
        persisted = [int(word.split("=")[1]) for word in words if word.startswith("persisted=")]
        reports = tuple(parse_report(word) for word in words if ":" in word)
        return ev.NodeJoined(
            node, arrived.num_slots, arrived.incarnation, reports, self.term,
            max(persisted, default=None), decorated,
        )  # fmt: skip

    def joined(self, node: str, *words: str, decorated: bool = False) -> list[str]:
        """The node tells this term's leader what it runs."""
        return self.report(node, self.inventory(node, *words, decorated=decorated))

    def elect(self, node: str) -> list[str]:
        """The last leader is gone; this one is fed the stream from its beginning."""
        self.term += 1
        self.state = ld.initial(self.config, node, self.term)
        self.in_flight = []
        lines: list[str] = []
        for arrived in self.nodes.values():
            lines += self.feed(arrived)
        if self.published is not None:
            lines += self.feed(self.published)
        for order in self.orders.copy():
            lines += self.feed(order)
        for report in self.reports.copy():
            lines += self.feed(report)
        return lines + self.feed(ch.LeaderChanged(node, self.term))

    def feed(self, event: ld.LeaderEvent) -> list[str]:
        """What it writes because of that, as lines; its writes are answered at once."""
        written = len(self.written)
        waiting: list[ld.LeaderEvent] = [event]
        while waiting and self.state is not None:
            waiting += self.step(waiting.pop(0))
        return [line for record in self.written[written:] for line in show(record)]

    def step(self, event: ld.LeaderEvent) -> list[ld.LeaderEvent]:
        assert self.state is not None
        decision = ld.step(self.state, event, self.now_s)
        assert decision == ld.step(self.state, event, self.now_s)
        assert decision.reason
        self.state, self.wake_s = decision.state, decision.wake_s
        self.events += [told for told, _ in decision.decisions]
        answers: list[ld.LeaderEvent] = []
        for effect in decision.effects:
            match effect:
                case ld.OpenStore(generation):
                    self.opened.append(generation)
                    answers.append(ld.Local(ev.StoreOpened(generation, "h", 1)))
                case ld.Write(record):
                    assert not self.in_flight, "two writes at one time"
                    self.in_flight.append(record)
                    if self.answers:
                        answers += self.take()
        return answers

    def take(self) -> list[ld.LeaderEvent]:
        """The record in flight is in the rendezvous, and in the stream."""
        record = self.in_flight.pop()
        self.written.append(record)
        if isinstance(record, ch.Published):
            old = self.published.plan.generation if self.published is not None else -1
            assert record.plan.generation > old
            self.orders = self.orders[self.num_old :]
            self.num_old = len(self.orders)
            self.published = record
            answered = record.answered
            self.reports = [r for r in self.reports if r.number > answered.get(r.node, (0, 0))[1]]
        elif isinstance(record, ch.Ordered):
            self.orders.append(record)
        return [record, ld.Written()]

    def at(self, now_s: float) -> list[str]:
        self.now_s = now_s
        return self.feed(ld.TimePassed())

    # ------------------------------------------------------------ what workers do

    def ready(self, *words: str, persisted: int | None = None) -> list[str]:
        lines = []
        for worker in map(parse_worker, words):
            lines += self.report(worker.node, ev.WorkerReady(worker, persisted))
        return lines

    def enter(self) -> list[str]:
        assert self.published is not None
        plan, lines = self.published.plan, []
        for member in self.published.plan.members:
            for cls in (ev.WorkerJoined, ev.WorkerRestored):
                lines += self.report(member.slot.node, cls(member.worker, plan.generation))
        return lines

    def stepped(self, word: str, step: int) -> list[str]:
        worker = parse_worker(word)
        assert self.published is not None
        event = ev.WorkerStepped(worker, self.published.plan.generation, step)
        return self.report(worker.node, event)

    def exited(self, word: str, status: int = -9) -> list[str]:
        worker = parse_worker(word)
        return self.report(worker.node, ev.WorkerExited(worker, status))

    def left(
        self, word: str, step: int, generation: int = 0, *, dirty: bool = False
    ) -> ch.Reported:
        """Not fed: it came out of its generation."""
        worker = parse_worker(word)
        holdings = () if dirty else (Holding(step),)
        return self.reported(worker.node, ev.WorkerInterrupted(worker, generation, step, holdings))


def training(config: Config = CONFIG, num_nodes: int = 2) -> Job:
    """Nodes n0, n1, ... of one slot train in generation 0; n0 leads. Step 1 is committed."""
    job = Job(config)
    for index in range(num_nodes):
        job.arrive(f"n{index}")
    job.elect("n0")
    for index in range(num_nodes):
        job.joined(f"n{index}")
    if job.core.plan is None:
        job.at(config.last_call_s)
    assert job.core.plan is not None
    for member in job.core.plan.members:
        job.report(member.slot.node, ev.WorkerReady(member.worker))
    job.enter()
    job.stepped("w0", 1)
    assert job.core.phase is Phase.RUNNING
    return job
