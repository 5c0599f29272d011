"""A journal's records as numbers: steps, recoveries with their phases, time lost.

One pass over the records. A *recovery* opens with the first fault of a generation and closes with
the first step that is committed afterwards; a further fault on the way belongs to it. Its phases
follow one another without a gap, so they add up to the whole:

    detect        the fault began -> first sign of it seen (unknown for a fault from outside)
    fence         -> every rank has left the generation or is dead (COLLECTING)
    agree         -> the next plan is published and its members are told to enter
    communicate   -> the last rank has made its process groups
    restore       -> the last rank has the state of the cut
    first step    -> the first step is committed

Where a further fault ended an attempt, *fence* lasts until the last attempt's COLLECTING.

*Time lost* to a recovery: all of its phases, and the steps that had been committed and were made
again (only after a cut from disk), at the usual pace. The part of a step that the fault cut short
is not counted where the fault's beginning is unknown.

*Effective training time ratio*: of the time between the first entry into the train function and
the end of training, the share that was not lost to recoveries: (training - lost) / training.
Start-up, before the first entry, is told apart.
"""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from resilient.core import events as ev
from resilient.core.model import Fault, FaultKind, Outcome, Worker
from resilient.core.policy import root_cause
from resilient.report.journal import Journal, Record


@dataclass(frozen=True)
class Phases:
    """How long each part of a recovery took; None: unknown, or not reached."""

    detect_s: float | None = None
    fence_s: float | None = None
    agree_s: float | None = None
    communicate_s: float | None = None
    restore_s: float | None = None
    first_step_s: float | None = None

    def items(self) -> list[tuple[str, float | None]]:
        """(name, seconds), in order."""
        return [
            ("detect", self.detect_s),
            ("fence", self.fence_s),
            ("agree", self.agree_s),
            ("communicate", self.communicate_s),
            ("restore", self.restore_s),
            ("first step", self.first_step_s),
        ]


@dataclass(frozen=True)
class Recovery:
    """From a fault to the next committed step.

    Attributes:
        causes: the root cause of each attempt: more than one when a further fault came on the way.
        collateral: faults that only followed from them.
        step: committed steps when it happened, that is the index of the step in progress.
        generation: the generation that ended.
        began_s: when the fault began if that is known, else when it was seen.
        ended_s: first committed step; None: never came.
        resume_step: the step training went on from; None: it did not.
        world_size: of the generation that went on; None: none did.
        shrunk: that one has fewer ranks than the one that ended.
        num_redone: committed steps that were made again.
        restart: an unmodified script was started again, from its beginning.
    """

    causes: tuple[Fault, ...]
    collateral: tuple[Fault, ...]
    step: int
    generation: int
    began_s: float
    ended_s: float | None
    phases: Phases
    resume_step: int | None = None
    world_size: int | None = None
    shrunk: bool = False
    num_redone: int = 0
    restart: bool = False

    @property
    def total_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.began_s


@dataclass(frozen=True)
class Summary:
    """One job in numbers.

    Attributes:
        outcome: None while it runs, or when its agent was killed.
        root_cause, collateral: of an end that was a failure.
        num_steps: newest committed step that is known; a running job is usually further.
        startup_s: from the agent's start to the first entry into the train function.
        training_s: from there to the end of training (so far).
        lost_s: of that, lost to recoveries.
        usual_step_s: as measured by the agent; None before it knew.
    """

    journal: Journal
    phase: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    root_cause: Fault | None = None
    collateral: tuple[Fault, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    num_steps: int = 0
    num_generations: int = 0
    world_size: int = 0
    num_spare_deaths: int = 0
    num_excluded: int = 0
    drained_by: int | None = None
    persisted_step: int | None = None
    startup_s: float | None = None
    training_s: float | None = None
    lost_s: float = 0.0
    usual_step_s: float | None = None

    @property
    def effective_ratio(self) -> float | None:
        """See the module's docstring; None before training began."""
        if not self.training_s:
            return None
        return max(0.0, (self.training_s - self.lost_s) / self.training_s)


@dataclass
class _Attempt:
    """Faults between two plans."""

    faults: list[Fault] = field(default_factory=list)


@dataclass
class _Open:
    """A recovery that has not ended yet. Times are of the newest attempt, None until reached."""

    first_seen_s: float
    step: int
    generation: int
    old_world_size: int
    attempts: list[_Attempt] = field(default_factory=lambda: [_Attempt()])
    collecting_s: float | None = None
    started_s: float | None = None
    joined_s: float | None = None
    restored_s: float | None = None
    next_generation: int | None = None
    resume_step: int | None = None
    world_size: int | None = None


class _Reader:
    """The pass over the records. Attributes are what is known so far."""

    def __init__(self) -> None:
        self.ranks: dict[Worker, int] = {}
        self.killed: set[Worker] = set()
        self.decorated = False
        self.generation = -1
        self.world_size = 0
        self.generations: set[int] = set()
        self.entered_s: float | None = None
        self.ended_s: float | None = None
        self.open: _Open | None = None
        self.recoveries: list[Recovery] = []
        self.num_steps = 0
        self.usual_step_s: float | None = None
        self.num_spare_deaths = 0
        self.excluded: set[tuple[Any, ...]] = set()
        self.drained_by: int | None = None
        self.persisted_step: int | None = None
        self.outcome: Outcome | None = None
        self.reason = ""
        self.finish_cause: dict[str, Any] | None = None

    def read(self, record: Record) -> None:
        for fault in self._faults(record):
            self._add(fault, record.now_s)
        self._count(record.event)
        for effect in record.effects:
            self._apply(effect, record)
        self._advance(record)

    # ------------------------------------------------------------ faults

    def _faults(self, record: Record) -> list[Fault]:
        """What went wrong by this event, while there was something that could go wrong."""
        event, now_s = record.event, record.now_s
        if self.generation < 0 or self.ended_s is not None:
            return []
        if isinstance(event, ev.WorkerExited):
            return self._exited(event, now_s)
        if isinstance(event, ev.WorkerFailed) and event.generation == self.generation:
            kind = FaultKind.COLLECTIVE if event.in_collective else FaultKind.RAISED
            fault = self._fault(kind, event.worker, event.step, now_s)
            return [replace(fault, error=event.error)]
        if isinstance(event, ev.WorkersHung) and event.generation == self.generation:
            return [
                replace(
                    self._fault(FaultKind.HUNG, worker, event.step, now_s),
                    began_s=event.began_s,
                    note=event.note,
                )
                for worker in event.workers
            ]
        if isinstance(event, ev.NodeLeft):
            return [
                replace(
                    self._fault(FaultKind.NODE_LOST, worker, self.num_steps, now_s),
                    note=event.note,
                )
                for worker in sorted(self.ranks)
                if worker.node == event.node
            ]
        return []

    def _exited(self, event: ev.WorkerExited, now_s: float) -> list[Fault]:
        if event.worker not in self.ranks:
            self.num_spare_deaths += event.worker not in self.killed
            return []
        if event.worker in self.killed:
            return []  # by the agent
        if event.status == 0 and not self.decorated:
            return []  # an unmodified script has ended
        fault = self._fault(FaultKind.DIED, event.worker, event.step, now_s)
        return [
            replace(
                fault,
                began_s=event.began_s,
                status=event.status,
                note=event.note,
                error=event.error,
            )
        ]

    def _fault(self, kind: FaultKind, worker: Worker, step: int, now_s: float) -> Fault:
        return Fault(kind, worker, self.ranks.get(worker), self.generation, step, seen_s=now_s)

    def _add(self, fault: Fault, now_s: float) -> None:
        if self.open is None:
            step = max(fault.step, self.num_steps)
            self.open = _Open(now_s, step, self.generation, self.world_size)
        self.open.attempts[-1].faults.append(fault)

    # ------------------------------------------------------------ progress

    def _count(self, event: ev.Event | None) -> None:
        if isinstance(event, ev.WorkerReady):
            self.decorated = True
        elif isinstance(event, ev.PaceMeasured):
            self.usual_step_s = event.usual_step_s
        elif isinstance(event, ev.DrainRequested):
            self.drained_by = event.signum
        step = getattr(event, "step", None)
        if isinstance(event, ev.Persisted):
            if step is not None:
                self.persisted_step = max(step, self.persisted_step or 0)
        elif isinstance(step, int):
            self.num_steps = max(self.num_steps, step)
        persisted = getattr(event, "persisted_step", None)
        if isinstance(persisted, int):
            self.persisted_step = max(persisted, self.persisted_step or 0)

    def _apply(self, effect: dict[str, Any], record: Record) -> None:
        name = effect.get("type")
        if name == "StartGeneration":
            self._enter(effect["plan"], record.now_s)
        elif name == "StartWorker" and self.entered_s is None:
            self._launch(effect, record.now_s)
        elif name == "KillWorker":
            self._kill(_worker(effect["worker"]), effect.get("reason", ""), record)
        elif name == "TerminateWorker" and self.entered_s is None:
            self.killed.add(_worker(effect["worker"]))
        elif name == "ExcludeSlot":
            self.excluded.add(tuple(effect["slot"]))
        elif name in ("Close", "Stop"):
            self._end(record.now_s)
        elif name == "Finish":
            self._end(record.now_s)
            self.outcome = Outcome(effect["outcome"])
            self.reason = effect.get("reason") or record.reason
            self.finish_cause = effect.get("root_cause")

    def _kill(self, worker: Worker, reason: str, record: Record) -> None:
        """A rank that does not come out is killed: the one that hung, among those that waited."""
        self.killed.add(worker)
        if self.open is None or worker not in self.ranks or record.phase != "stopping":
            return
        faults = self.open.attempts[-1].faults
        for index, fault in enumerate(faults):
            if fault.worker == worker and fault.kind is FaultKind.HUNG:
                faults[index] = replace(fault, status=-signal.SIGKILL)
                return
        fault = self._fault(FaultKind.HUNG, worker, self.num_steps, record.now_s)
        self._add(replace(fault, status=-signal.SIGKILL, note=reason), record.now_s)

    def _enter(self, plan: dict[str, Any], now_s: float) -> None:
        self.generation = plan["generation"]
        self.ranks = {_worker(m["worker"]): m["rank"] for m in plan["members"]}
        self.world_size = len(self.ranks)
        self.generations.add(self.generation)
        if self.entered_s is None:
            self.entered_s = now_s
        if self.open is not None:
            if self.open.collecting_s is None or self.open.started_s is not None:
                self.open.collecting_s = now_s  # the plan was made in the same decision
            self.open.started_s = now_s
            self.open.joined_s = self.open.restored_s = None
            self.open.next_generation = self.generation
            self.open.resume_step = plan["cut"]["step"]
            self.open.world_size = self.world_size
            self.open.attempts.append(_Attempt())

    def _launch(self, effect: dict[str, Any], now_s: float) -> None:
        """A worker of an unmodified script, or of a decorated one that has not said so yet."""
        plan = effect.get("plan")
        if plan is None or effect.get("slot") is None:
            return
        if plan["generation"] > self.generation:
            if self.open is not None:
                self.open.started_s = now_s
                self.open.world_size = len(plan["members"])
                self._close(now_s, restart=True)
            self.generation = plan["generation"]
            self.generations.add(self.generation)
            self.ranks = {}
        for member in plan["members"]:
            self.ranks[_worker(member["worker"])] = member["rank"]
        self.world_size = len(plan["members"])

    def _advance(self, record: Record) -> None:
        """The open recovery gets one phase further, or ends."""
        recovery, event = self.open, record.event
        if recovery is None:
            return
        if record.phase == "collecting" and (
            recovery.collecting_s is None or recovery.started_s is not None
        ):
            recovery.collecting_s, recovery.started_s = record.now_s, None
        if getattr(event, "generation", None) != recovery.next_generation:
            return
        if isinstance(event, ev.WorkerJoined):
            recovery.joined_s = record.now_s
        elif isinstance(event, ev.WorkerRestored):
            recovery.restored_s = record.now_s
        elif isinstance(event, ev.WorkerStepped) or (
            isinstance(event, ev.WorkerFinished) and recovery.restored_s is not None
        ):
            if recovery.attempts[-1].faults:
                return  # a step got through, but the next fault is already being dealt with
            self._close(record.now_s)

    def _end(self, now_s: float) -> None:
        if self.ended_s is None:
            self.ended_s = now_s
            if self.open is not None:
                self._close(None)

    def _close(self, ended_s: float | None, restart: bool = False) -> None:
        assert self.open is not None
        self.recoveries.append(_recovery(self.open, ended_s, restart))
        self.open = None


def summarize(journal: Journal) -> Summary:
    """The whole journal in numbers. A recovery that has not ended comes last, without an end."""
    reader = _Reader()
    for record in journal.records:
        reader.read(record)
    last_s = journal.records[-1].now_s if journal.records else 0.0
    if reader.open is not None:
        reader._close(None)
    recoveries = list(reader.recoveries)
    training_s = startup_s = None
    ended_s = reader.ended_s if reader.ended_s is not None else last_s
    if reader.entered_s is not None:
        began_s = journal.header.get("now", journal.records[0].now_s)
        startup_s = reader.entered_s - began_s
        training_s = ended_s - reader.entered_s
    lost_s = 0.0
    for recovery in recoveries:
        until_s = recovery.ended_s if recovery.ended_s is not None else ended_s
        redone_s = recovery.num_redone * (reader.usual_step_s or 0.0)
        lost_s += until_s - recovery.began_s + redone_s
    cause, collateral = _end_cause(reader, recoveries)
    return Summary(
        journal=journal,
        phase=journal.records[-1].phase if journal.records else "",
        outcome=reader.outcome,
        reason=reader.reason,
        root_cause=cause,
        collateral=collateral,
        recoveries=tuple(recoveries),
        num_steps=reader.num_steps,
        num_generations=len(reader.generations),
        world_size=reader.world_size,
        num_spare_deaths=reader.num_spare_deaths,
        num_excluded=len(reader.excluded),
        drained_by=reader.drained_by,
        persisted_step=reader.persisted_step,
        startup_s=startup_s,
        training_s=training_s,
        lost_s=lost_s,
        usual_step_s=reader.usual_step_s,
    )


def _recovery(opened: _Open, ended_s: float | None, restart: bool) -> Recovery:
    causes, collateral = [], []
    for attempt in opened.attempts:
        cause = root_cause(attempt.faults)
        if cause is not None:
            causes.append(cause)
            collateral += [fault for fault in attempt.faults if fault is not cause]
    began_s = opened.first_seen_s
    if causes[0].began_s is not None:
        began_s = min(began_s, causes[0].began_s)
    marks = [
        opened.first_seen_s,
        opened.collecting_s,
        opened.started_s,
        opened.joined_s,
        opened.restored_s,
        ended_s,
    ]
    spans = [_span(*pair) for pair in itertools.pairwise(marks)]
    detect_s = None if causes[0].began_s is None else opened.first_seen_s - began_s
    resume_step = opened.resume_step
    return Recovery(
        causes=tuple(causes),
        collateral=tuple(collateral),
        step=opened.step,
        generation=opened.generation,
        began_s=began_s,
        ended_s=ended_s,
        phases=Phases(detect_s, *spans),
        resume_step=resume_step,
        world_size=opened.world_size,
        shrunk=opened.world_size is not None and opened.world_size < opened.old_world_size,
        num_redone=0 if resume_step is None else max(0, opened.step - resume_step),
        restart=restart,
    )


def _span(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _end_cause(
    reader: _Reader, recoveries: list[Recovery]
) -> tuple[Fault | None, tuple[Fault, ...]]:
    """Why the job ended, when that was a failure: the fault that no recovery followed.

    What the coordinator named as the cause stands; the faults seen last are the collateral ones.
    """
    if reader.outcome in (None, Outcome.DONE, Outcome.DRAINED):
        return None, ()
    cause: Fault | None = None
    collateral: tuple[Fault, ...] = ()
    if recoveries and recoveries[-1].ended_s is None:
        failed = recoveries.pop()
        cause, collateral = failed.causes[-1], failed.collateral
    if reader.finish_cause is not None:
        try:
            named = msgspec.convert(reader.finish_cause, Fault)
        except msgspec.ValidationError:
            named = None  # of a newer version: what was seen has to do
        if named is not None and (cause is None or named.worker != cause.worker):
            cause = named
    return cause, collateral


def _worker(value: Any) -> Worker:
    """JSON has no named tuples: [node, number]."""
    return Worker(str(value[0]), int(value[1]))
