"""Does a worker still make progress? Fed with readings of the progress pages, nothing else.

The one idea: only time that was *observed* counts against a worker. Between two observations at
most one quantum is added to everybody's stall, however long the pause really was. So when the agent
itself was suspended, starved or moved to another machine, all deadlines move on by that gap, and a
pause of the whole machine is no hang. (The idea, a sick observer that stretches its own timeouts,
is Lifeguard's: Dadgar, Phillips, Currey, "Lifeguard: Local Health Awareness for More Accurate
Failure Detection", 2018. Theirs multiplies timeouts by a bounded health score; here the lost time
itself is taken off. The price: an agent that is starved all the time sees a hang late, by the
factor at which it is starved.)

How long is too long is learned: a multiple of the usual step, and of the longest step of the last
hours, between a floor and a ceiling; or what the user gave. The first step of a generation
(everything from the order to enter until the first commit) and sections have limits of their own.

An unmodified script is watched by its optimizer steps (ticks), only when the user gave a timeout,
and only from its first tick on: before that nobody can tell an import from a hang.

Who is *not* accused: a worker that waits for a peer. Blocked in a collective it looks hung, so
one that is past its limit is excused while a peer that is not ahead of it is still within a longer
limit of its own (rank 0 saves in a section, the others wait for it in the next step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import NamedTuple

from resilient.core.events import PaceMeasured, WorkersHung
from resilient.core.model import Worker
from resilient.errors import ConfigError

USUAL_STEPS = 20.0  # a step that takes this many usual ones is a hang
LONGEST_STEPS = 3.0  # or this many of the longest one seen lately
LATELY_S = 3600.0  # "lately" is the current and the last period of this length
NUM_RECENT = 64  # samples in the median
PACE_FACTOR = 2.0  # a pace that moved by more than this is told
QUANTUM_S = 1.0  # most that one observation adds to a stall
EPSILON_S = 1e-9


class Activity(IntEnum):
    """As in the progress page, which core must not import; a test compares the two."""

    STARTING = 0
    WAITING = 1
    JOINING = 2
    BUILDING = 3
    RESTORING = 4
    TRAINING = 5
    SECTION = 6
    FINISHED = 7
    PERSISTING = 8


_ENTERING = (Activity.WAITING, Activity.JOINING, Activity.BUILDING, Activity.RESTORING)


@dataclass(frozen=True)
class Limits:
    """How long a worker may show no progress, in seconds.

    Attributes:
        hang_timeout_s: what the user gave; None: learned from the pace (decorated scripts), or no
            detection at all (unmodified scripts).
        first_step_timeout_s: for making groups, building, restoring and the first step.
        section_timeout_s: for a section that names no timeout of its own.
        floor_s, ceiling_s: bounds of the learned timeout.
    """

    hang_timeout_s: float | None = None
    first_step_timeout_s: float = 300.0
    section_timeout_s: float = 300.0
    floor_s: float = 30.0
    ceiling_s: float = 1800.0

    def check(self) -> None:
        """Raises ConfigError when a value makes no sense."""
        if self.hang_timeout_s is not None and not self.hang_timeout_s > 0:
            raise ConfigError("--hang-timeout must be greater than 0 seconds")
        if not min(self.first_step_timeout_s, self.section_timeout_s) > 0:
            raise ConfigError("the timeouts of the first step and of sections must be above 0 s")
        if not 0 < self.floor_s <= self.ceiling_s:
            raise ConfigError(
                f"the hang timeout's floor ({self.floor_s:g} s) must be above 0 and not above its "
                f"ceiling ({self.ceiling_s:g} s)"
            )


@dataclass(frozen=True)
class Pulse:
    """One reading of one worker's progress page. Times: seconds of the agent's monotonic clock.

    Attributes:
        generation: that the worker has entered; -1 before the first.
        step: committed steps.
        progress_s: last sign of progress.
        commit_s: newest commit, 0 before the first.
        section, section_timeout_s: name of the section being run and its own limit, 0 for none.
        ticks: optimizer steps of an unmodified script.
    """

    worker: Worker
    generation: int
    step: int
    activity: Activity
    progress_s: float
    commit_s: float = 0.0
    section: str = ""
    section_timeout_s: float = 0.0
    ticks: int = 0


class Findings(NamedTuple):
    """Events for the coordinator; None where there is nothing to say."""

    hung: WorkersHung | None = None
    pace: PaceMeasured | None = None


@dataclass
class _Watched:
    """What is remembered of one worker. `moved_at_s` is on the clock of observed time."""

    pulse: Pulse
    moved_at_s: float
    is_unusual: bool = False  # since the last commit: a section, or time nobody observed


class _Case(NamedTuple):
    pulse: Pulse
    stall_s: float
    limit_s: float
    has_own_limit: bool  # longer than the usual one because of what it does


def learned_timeout_s(usual_step_s: float, longest_step_s: float, limits: Limits) -> float:
    """The hang timeout that a pace gives: clamp(max(20 usual, 3 longest), floor, ceiling)."""
    wanted = max(USUAL_STEPS * usual_step_s, LONGEST_STEPS * longest_step_s)
    return min(max(wanted, limits.floor_s), limits.ceiling_s)


class Detector:
    """Watches the members of one generation at a time; what it learned of the pace stays.

    Deterministic: the same calls give the same findings.
    """

    def __init__(self, limits: Limits) -> None:
        limits.check()
        self.limits = limits
        # A quarter of the shortest timeout, so that no single pause can exceed it by itself.
        shortest = min(
            limits.floor_s if limits.hang_timeout_s is None else limits.hang_timeout_s,
            limits.first_step_timeout_s,
            limits.section_timeout_s,
        )
        self._quantum_s = min(QUANTUM_S, shortest / 4)
        self._members: frozenset[Worker] = frozenset()
        self._generation = -1
        self._decorated = True
        self._closing = False
        self._started_s = 0.0
        self._watched: dict[Worker, _Watched] = {}
        self._observed_s = 0.0  # the clock of observed time
        self._last_s: float | None = None
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._longest = [0.0, 0.0]  # of the current and of the last period
        self._period_began_s: float | None = None
        self._told_pace_s: float | None = None
        self._suspected = False  # the last generation ended with a verdict

    # ------------------------------------------------------------ what is watched

    def watch(
        self, generation: int, workers: Iterable[Worker], now_s: float, *, decorated: bool = True
    ) -> None:
        """These workers were told to enter the generation (or, unmodified, were launched)."""
        self._generation = generation
        self._members = frozenset(workers)
        self._decorated = decorated
        self._closing = False
        self._started_s = now_s
        self._watched = {}

    def close(self, now_s: float) -> None:
        """Every member has finished and was told to return from main().

        From here on only those whose page still says FINISHED are watched, with the first step's
        limit; whoever has returned from main() says something else, and takes as long as it likes.
        """
        self._closing = True
        self._started_s = now_s
        self._watched = {}

    def stop(self) -> None:
        """The generation was aborted or is over: the coordinator's own bounds hold from here."""
        self._members = frozenset()
        self._watched = {}

    # ------------------------------------------------------------ what is known

    @property
    def usual_step_s(self) -> float | None:
        """Median of the recent steps; None before the first was measured."""
        return median(self._recent) if self._recent else None

    @property
    def step_timeout_s(self) -> float:
        """How long a step after the first one may take now."""
        if self.limits.hang_timeout_s is not None:
            return self.limits.hang_timeout_s
        if not self._recent:  # nothing is known of the pace
            return max(self.limits.floor_s, self.limits.first_step_timeout_s)
        return learned_timeout_s(median(self._recent), max(self._longest), self.limits)

    # ------------------------------------------------------------ observing

    def observe(self, pulses: Iterable[Pulse], now_s: float) -> Findings:
        """Takes one reading of every living worker; call it every 50 to 100 ms.

        Returns:
            hung: names every member that stands still, ascending; began_s is the earliest last
                progress among them, step their lowest step. Told again only after as much
                time without progress as before.
            pace: the usual step time, when it is first known or has moved by more than a factor
                of two.
        """
        gap_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        counted_s = min(gap_s, self._quantum_s)
        self._observed_s += counted_s
        self._last_s = now_s
        self._turn_period(now_s)
        if gap_s > counted_s:
            for known in self._watched.values():
                known.is_unusual = True
        cases = []
        for pulse in sorted((p for p in pulses if p.worker in self._members), key=_by_worker):
            self._take(pulse, now_s, counted_s)
            case = self._case(pulse)
            if case is not None:
                cases.append(case)
        return Findings(self._verdict(cases), self._pace())

    def _take(self, pulse: Pulse, now_s: float, counted_s: float) -> None:
        """Notes whether the worker has moved since the last reading, and how long its step took."""
        known = self._watched.get(pulse.worker)
        if known is None:
            self._watched[pulse.worker] = _Watched(pulse, self._observed_s)
            return
        before = known.pulse
        if _moved(before, pulse):
            # It moved some time within the observed part of the gap, but not before it.
            known.moved_at_s = self._observed_s - min(counted_s, max(0.0, now_s - pulse.progress_s))
        if pulse.commit_s != before.commit_s or pulse.ticks != before.ticks:
            self._measure(known, pulse)
            known.is_unusual = False
        known.is_unusual |= pulse.activity is Activity.SECTION
        known.pulse = pulse

    def _measure(self, known: _Watched, pulse: Pulse) -> None:
        """A step's length: between two commits of one generation, or two ticks."""
        before = known.pulse
        if not self._decorated:
            if pulse.ticks > before.ticks > 0 and not known.is_unusual:
                took_s = pulse.progress_s - before.progress_s
                self._learn(took_s / (pulse.ticks - before.ticks), took_s)
            return
        if pulse.generation != self._generation or pulse.commit_s <= before.commit_s:
            return
        if before.generation == self._generation and self._has_stepped(before):
            if not known.is_unusual:
                took_s = pulse.commit_s - before.commit_s
                self._learn(took_s / max(1, pulse.step - before.step), took_s)
        elif self._suspected and before.activity is Activity.TRAINING and not known.is_unusual:
            # A step that was taken for a hang and passes now, as the first one of a generation, was
            # only long: remember that, or it is taken for a hang each time it comes.
            self._longest[0] = max(self._longest[0], pulse.commit_s - before.progress_s)
            self._suspected = False

    def _learn(self, usual_s: float, longest_s: float) -> None:
        self._suspected = False
        self._recent.append(usual_s)
        self._longest[0] = max(self._longest[0], longest_s)

    def _turn_period(self, now_s: float) -> None:
        if self._period_began_s is None:
            self._period_began_s = now_s
        elif now_s - self._period_began_s > LATELY_S:
            self._period_began_s = now_s
            self._longest = [0.0, self._longest[0]]

    def _has_stepped(self, pulse: Pulse) -> bool:
        return pulse.generation == self._generation and pulse.commit_s >= self._started_s

    def _case(self, pulse: Pulse) -> _Case | None:
        """How long this worker has stood still, and how long it may; None: it is not watched."""
        usual_s = self.step_timeout_s
        stall_s = self._observed_s - self._watched[pulse.worker].moved_at_s
        if not self._decorated:
            if self.limits.hang_timeout_s is None or pulse.ticks == 0:
                return None
            return _Case(pulse, stall_s, usual_s, False)
        if self._closing:
            if pulse.activity is not Activity.FINISHED:
                return None
            return _Case(pulse, stall_s, self.limits.first_step_timeout_s, False)
        entered = pulse.generation == self._generation
        if entered and pulse.activity in (Activity.FINISHED, Activity.PERSISTING):
            return None
        first_s = max(self.limits.first_step_timeout_s, usual_s)
        if not entered or pulse.activity in _ENTERING:
            return _Case(pulse, stall_s, first_s, True)  # told to enter, and not there yet
        if pulse.activity is Activity.SECTION:
            own_s = pulse.section_timeout_s or max(self.limits.section_timeout_s, usual_s)
            return _Case(pulse, stall_s, own_s, True)
        if not self._has_stepped(pulse):
            return _Case(pulse, stall_s, first_s, True)
        return _Case(pulse, stall_s, usual_s, False)

    # ------------------------------------------------------------ findings

    def _verdict(self, cases: list[_Case]) -> WorkersHung | None:
        late = [c for c in cases if _is_late(c) and not _is_excused(c, cases)]
        if not late:
            return None
        # Those blocked behind the first one stand still too, some moments younger.
        still = [c for c in cases if c.stall_s >= min(c.limit_s, min(x.limit_s for x in late)) / 2]
        for case in still:
            self._watched[case.pulse.worker].moved_at_s = self._observed_s
        self._suspected = True
        return WorkersHung(
            generation=self._generation,
            workers=tuple(c.pulse.worker for c in still),
            step=min(c.pulse.step for c in still),
            began_s=min(c.pulse.progress_s for c in still),
            note="; ".join(_describe(c, self._generation) for c in still),
        )

    def _pace(self) -> PaceMeasured | None:
        usual_s = self.usual_step_s
        if usual_s is None or usual_s <= 0:
            return None
        told_s = self._told_pace_s
        if told_s is not None and told_s / PACE_FACTOR <= usual_s <= told_s * PACE_FACTOR:
            return None
        self._told_pace_s = usual_s
        return PaceMeasured(usual_s)


def _by_worker(pulse: Pulse) -> Worker:
    return pulse.worker


def _moved(before: Pulse, after: Pulse) -> bool:
    return (
        after.progress_s != before.progress_s
        or after.step != before.step
        or after.ticks != before.ticks
        or after.generation != before.generation
    )


def _is_late(case: _Case) -> bool:
    return case.stall_s >= case.limit_s - EPSILON_S


def _is_excused(late: _Case, cases: list[_Case]) -> bool:
    """Whether a peer, not ahead of it, still does something that has a longer limit."""
    return any(
        case.has_own_limit
        and not _is_late(case)
        and case.limit_s > late.limit_s
        and case.pulse.step <= late.pulse.step
        for case in cases
        if case is not late
    )


def _describe(case: _Case, generation: int) -> str:
    pulse = case.pulse
    what = pulse.activity.name.lower()
    if pulse.activity is Activity.SECTION:
        what = f"section {pulse.section!r}"
    elif pulse.activity is Activity.STARTING:
        what = f"tick {pulse.ticks}"
    elif pulse.generation != generation:
        what = f"not yet in generation {generation}"
    return (
        f"worker {pulse.worker.node}/{pulse.worker.number}: step {pulse.step}, {what}, "
        f"no progress for {case.stall_s:.1f} s (limit {case.limit_s:g} s)"
    )
