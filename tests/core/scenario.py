"""Scripts of events and the effects they must have: a small language and its runner.

A file is one scenario. Lines:

    # text                       for people
    config replace=no min_world_size=2
    world 4                      a node of 4 slots: workers w0..w3 train in generation 0; spares, if
                                 any are configured, are started as w4... (not ready yet)
    fresh 4                      the same node, before any worker is ready
    cluster 3 2                  nodes n0, n1, n2 of 2 slots (incarnations 1, 2, 3): their workers
                                 w0..w5 train in generation 0, which began at 0 s. Where more
                                 nodes are allowed, the last call for them was over then
    @12.5 exited w2 -9 step=40   an event, at that time (default: the time of the last one)
    > kill w0: reason            an effect of the event before; all of them, in order
    = running wake=5             the state after it: phase and wake time

Events: see EVENTS below; a worker is w<number> on node n0, w<number>@<node> elsewhere; the
generation is the current plan's unless gen= says otherwise. Whoever leaves a generation holds the
state of step=; or instead nothing ("dirty"), or what live= and undo= say, as STEP or
STEP@GENERATION. Two short forms, of members of the plan: `enter`, joined and restored of each;
`out n1 step=40`, interrupted of each that is inside on these nodes (on all, if none is named).

    node n3 2                    a node comes with 2 slots. inc=: its incarnation; without it the
                                 next one, or 0 where only one node is allowed and none has any
    node n1 2 w4@n1/0:ready:g0:s41:live41:undo40@0 w7@n1:starting persisted=40 decorated
                                 it brings workers along: w4 in slot 0, w7 in none. g: the
                                 generation that it is or was in, s: its step, and what it holds
    node-left n1                 its agent is gone; "uncertain": only its lease has ended. inc=: of
                                 that incarnation, without it the one that is there
    persisted w3 step=40         the answer to persist, and to look; without step=: nothing there

A file is complete: an effect that is not listed fails it. `python -m tests.core.scenario FILE...`
prints files with what happens now; look at every line before you keep it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.model import (
    Config,
    Cut,
    ErrorInfo,
    Fault,
    Holding,
    Phase,
    Slot,
    State,
    Status,
    Worker,
    WorkerReport,
)
from resilient.core.ranks import iterate

NODE = "n0"


# ---------------------------------------------------------------- texts


def show_worker(worker: Worker) -> str:
    return f"w{worker.number}" + ("" if worker.node == NODE else f"@{worker.node}")


def show_workers(workers: tuple[Worker, ...]) -> str:
    return " ".join(show_worker(worker) for worker in workers) or "nobody"


def show_slot(slot: Slot) -> str:
    return f"{slot.node}/{slot.local_rank}"


def show_cut(cut: Cut) -> str:
    holders = f" from {','.join(map(str, cut.holders))}" if cut.holders else ""
    return f"{cut.kind.value} {cut.step}{holders}"


def show_fault(fault: Fault | None) -> str:
    if fault is None:
        return "none"
    status = "" if fault.status is None else f" status {fault.status}"
    return f"{fault.kind.value} rank {fault.rank} at {fault.step}{status}"


def show_effect(effect: ev.Effect) -> str:
    """One line; reasons are left out (they are for people, and never parsed)."""
    match effect:
        case ev.OpenStore(generation):
            return f"open-store {generation}"
        case ev.StartWorker(worker, slot, _, restarts):
            where = "spare" if slot is None else show_slot(slot)
            return f"start {show_worker(worker)} {where}" + (
                f" restart {restarts}" * bool(restarts)
            )
        case ev.PublishPlan(plan):
            ranks = " ".join(f"{m.rank}={show_worker(m.worker)}" for m in plan.members)
            return f"publish {plan.generation}: {ranks}; {show_cut(plan.cut)}"
        case ev.StartGeneration(plan):
            return f"start-generation {plan.generation}"
        case ev.AbortGeneration(generation, workers, _):
            return f"abort {generation}: {show_workers(workers)}"
        case ev.DumpStacks(workers):
            return f"dump {show_workers(workers)}"
        case ev.TerminateWorker(worker, signum):
            return f"terminate {show_worker(worker)} {signum}"
        case ev.KillWorker(worker, _):
            return f"kill {show_worker(worker)}"
        case ev.ExcludeSlot(slot, _):
            return f"exclude {show_slot(slot)}"
        case ev.Look(worker):
            return f"look {show_worker(worker)}"
        case ev.Persist(worker, step):
            return f"persist {show_worker(worker)} {step}"
        case ev.Close(workers):
            return f"close {show_workers(workers)}"
        case ev.Stop(workers, outcome, _):
            return f"stop {show_workers(workers)} ({outcome.value})"
        case ev.Finish(outcome, cause, _):
            return f"finish {outcome.value}; cause: {show_fault(cause)}"
    raise AssertionError(effect)


def describe(state: State, wake_s: float | None) -> str:
    wake = "never" if wake_s is None else f"{wake_s:g}"
    return f"{state.phase.value} wake={wake}"


# ---------------------------------------------------------------- events


@dataclass
class Line:
    """One event as it was written: positional words and key=value words."""

    name: str
    words: list[str]
    options: dict[str, str] = field(default_factory=dict)

    def worker(self) -> Worker:
        return parse_worker(self.words[0])

    def number(self, name: str, default: int | None = None) -> Any:
        value = self.options.get(name)
        return default if value is None else int(value)


def parse_worker(word: str) -> Worker:
    number, _, node = word.removeprefix("w").partition("@")
    return Worker(node or NODE, int(number))


def parse_slot(word: str) -> Slot:
    node, _, local_rank = word.partition("/")
    return Slot(node, int(local_rank))


def _generation(line: Line, state: State) -> int:
    current = state.plan.generation if state.plan else -1
    return line.number("gen", current)


def parse_holding(source: str, word: str) -> Holding:
    """STEP or STEP@GENERATION."""
    step, _, generation = word.partition("@")
    return Holding(int(step), source, int(generation or -1))


def parse_report(word: str) -> WorkerReport:
    """w4@n1/0:ready:g0:s41:live41:undo40@0, and parts of it."""
    name, status, *parts = word.split(":")
    name, _, local_rank = name.partition("/")
    worker = parse_worker(name)
    slot = Slot(worker.node, int(local_rank)) if local_rank else None
    numbers = {"g": -1, "s": 0}
    holdings = []
    for part in parts:
        match = re.fullmatch(r"(g|s|live|undo)(\d+(?:@\d+)?)", part)
        assert match, part
        if match[1] in numbers:
            numbers[match[1]] = int(match[2])
        else:
            holdings.append(parse_holding(match[1], match[2]))
    held = tuple(holding.of(numbers["g"]) for holding in holdings)
    return WorkerReport(worker, Status(status), slot, numbers["g"], numbers["s"], held)


def _holdings(line: Line, step: int) -> tuple[Holding, ...]:
    """The state of that step, unless the line says otherwise."""
    said = [source for source in ("live", "undo") if source in line.options]
    if said:
        return tuple(parse_holding(source, line.options[source]) for source in said)
    if "none" in line.words or "dirty" in line.words:
        return ()
    return (Holding(step, "live"),)


def _error(line: Line) -> ErrorInfo:
    name = line.options.get("error", "builtins.ValueError")
    return ErrorInfo(name, line.options.get("at", "train.py:7"))


def _leaving(cls: type[Any]) -> Callable[[Line, State], ev.Event]:
    def make(line: Line, state: State) -> ev.Event:
        step = line.number("step", 0)
        more = {}
        if cls is ev.WorkerFailed:
            more = {"error": _error(line), "in_collective": "collective" in line.words}
        event: ev.Event = cls(
            worker=line.worker(),
            generation=_generation(line, state),
            step=step,
            holdings=_holdings(line, step),
            persisted_step=line.number("persisted"),
            **more,
        )
        return event

    return make


def _exited(line: Line, state: State) -> ev.Event:
    return ev.WorkerExited(
        line.worker(), int(line.words[1]), line.number("step", 0), line.number("persisted")
    )


def _hung(line: Line, state: State) -> ev.Event:
    workers = tuple(parse_worker(word) for word in line.words)
    return ev.WorkersHung(_generation(line, state), workers, line.number("step", 0), began_s=0.0)


def _node(line: Line, state: State) -> ev.Event:
    node, num_slots, *words = line.words
    has_rendezvous = state.config.max_nodes > 1 or any(state.incarnations.values())
    next_one = max(state.incarnations.values(), default=0) + 1 if has_rendezvous else 0
    return ev.NodeJoined(
        node,
        int(num_slots),
        line.number("inc", next_one),
        tuple(parse_report(word) for word in words if ":" in word),
        persisted_step=line.number("persisted"),
        decorated="decorated" in words,
    )


def _node_left(line: Line, state: State) -> ev.Event:
    node = line.words[0]
    incarnation = line.number("inc", state.incarnations.get(node, 0))
    return ev.NodeLeft(node, "", incarnation, "uncertain" not in line.words)


EVENTS: dict[str, Callable[[Line, State], ev.Event]] = {
    "node": _node,
    "node-left": _node_left,
    "store": lambda line, _: ev.StoreOpened(int(line.words[0]), "127.0.0.1", 1),
    "ready": lambda line, _: ev.WorkerReady(line.worker(), line.number("persisted")),
    "joined": lambda line, state: ev.WorkerJoined(line.worker(), _generation(line, state)),
    "restored": lambda line, state: ev.WorkerRestored(line.worker(), _generation(line, state)),
    "stepped": lambda line, state: ev.WorkerStepped(
        line.worker(), _generation(line, state), line.number("step")
    ),
    "interrupted": _leaving(ev.WorkerInterrupted),
    "failed": _leaving(ev.WorkerFailed),
    "finished": _leaving(ev.WorkerFinished),
    "exited": _exited,
    "hung": _hung,
    "slow": lambda line, state: ev.WorkerSlow(line.worker(), _generation(line, state)),
    "pace": lambda line, _: ev.PaceMeasured(float(line.words[0])),
    "health": lambda line, _: ev.HealthCheckFailed(parse_slot(line.words[0]), "bad"),
    "persisted": lambda line, _: ev.Persisted(line.worker(), line.number("step"), "disk full"),
    "drain": lambda line, _: ev.DrainRequested(
        int(line.words[0]) if line.words else 15, "force" in line.words
    ),
    "time": lambda line, _: ev.TimePassed(),
}


def parse_config(words: list[str]) -> Config:
    values: dict[str, Any] = {}
    types = {f.name: f.type for f in fields(Config)}
    for word in words:
        name, _, value = word.partition("=")
        kind = types[name]
        values[name] = (
            value == "yes" if kind == "bool" else (int if kind == "int" else float)(value)
        )
    return Config(**values)


# ---------------------------------------------------------------- running


class Scenario:
    """One run. Feed it lines; it gives back what happened, as lines."""

    def __init__(self) -> None:
        self.state = coordinator.initial(Config())
        self.now_s = 0.0
        self.wake_s: float | None = None

    def feed(self, event: ev.Event) -> list[str]:
        decision = coordinator.step(self.state, event, self.now_s)
        assert decision.reason
        self.state, self.wake_s = decision.state, decision.wake_s
        return [show_effect(effect) for effect in decision.effects]

    def line(self, text: str) -> list[str]:
        """Carries out one line that is neither comment nor expectation."""
        words = text.split()
        if words[0].startswith("@"):
            self.now_s = float(words.pop(0)[1:])
        name, rest = words[0], words[1:]
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        line = Line(name, [word for word in rest if "=" not in word], options)
        if name == "config":
            self.state = coordinator.initial(parse_config(rest))
            return []
        if name == "fresh":
            return self._fresh(int(rest[0]))
        if name == "world":
            return self._world(int(rest[0]))
        if name == "cluster":
            return self._cluster(int(rest[0]), int(rest[1]))
        if name == "enter":
            return self._enter()
        if name == "out":
            return self._out(line)
        return self.feed(EVENTS[name](line, self.state))

    def _fresh(self, num_slots: int) -> list[str]:
        effects = self.feed(ev.NodeJoined(NODE, num_slots))
        return effects + self.feed(ev.StoreOpened(0, "127.0.0.1", 1))

    def _world(self, num_slots: int) -> list[str]:
        """Brings it up; its effects are those of forming.txt and are not repeated."""
        self._fresh(num_slots)
        for number in range(num_slots):
            self.feed(ev.WorkerReady(Worker(NODE, number)))
        self._enter()
        self.feed(ev.StoreOpened(1, "127.0.0.1", 1))
        assert self.state.phase is Phase.RUNNING
        return []

    def _cluster(self, num_nodes: int, num_slots: int) -> list[str]:
        """As _world; the effects are those of nodes_last_call.txt."""
        config = self.state.config
        self.state = coordinator.initial(
            replace(config, max_nodes=max(num_nodes, config.max_nodes))
        )
        self.now_s = -config.last_call_s
        for index in range(num_nodes):
            self.feed(ev.NodeJoined(f"n{index}", num_slots, index + 1))
        self.feed(ev.StoreOpened(0, "127.0.0.1", 1))
        self.now_s = 0.0
        self.feed(ev.TimePassed())
        assert self.state.plan is not None
        for member in self.state.plan.members:
            self.feed(ev.WorkerReady(member.worker))
        self._enter()
        self.feed(ev.StoreOpened(1, "127.0.0.1", 1))
        assert self.state.phase is Phase.RUNNING
        return []

    def _out(self, line: Line) -> list[str]:
        plan, step = self.state.plan, line.number("step", 0)
        assert plan is not None
        inside = self.state.roster.inside
        nodes = line.words or [member.slot.node for member in plan.members]
        effects = []
        for rank in iterate(inside):
            worker = plan.members[rank].worker
            if worker.node in nodes:
                told = ev.WorkerInterrupted(
                    worker, plan.generation, step, _holdings(line, step), line.number("persisted")
                )
                effects += self.feed(told)
        return effects

    def _enter(self) -> list[str]:
        assert self.state.plan is not None
        effects = []
        for member in self.state.plan.members:
            generation = self.state.plan.generation
            effects += self.feed(ev.WorkerJoined(member.worker, generation))
            effects += self.feed(ev.WorkerRestored(member.worker, generation))
        return effects


def run(text: str) -> str:
    """The file with what happens now in place of what was expected."""
    return "\n".join(_run(text.splitlines())) + "\n"


def _run(lines: list[str]) -> Iterator[str]:
    scenario = Scenario()
    for line in lines:
        stripped = line.split("#")[0].strip()
        if stripped.startswith((">", "=")):
            continue
        yield line.rstrip()
        if not stripped:
            continue
        for effect in scenario.line(stripped):
            yield f"  > {effect}"
        if stripped.split()[0] not in ("config",):
            yield f"  = {describe(scenario.state, scenario.wake_s)}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path) as file:
            print(run(file.read()), end="")
