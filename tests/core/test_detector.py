"""Hang detection as tables: what the pages say, second by second, and what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient import page
from resilient.core import detector as d
from resilient.core.model import Worker
from resilient.errors import ConfigError

A, B = Worker("n0", 0), Worker("n0", 1)
POLL_S = 0.1


class Bench:
    """Pages that the test sets, a clock that it turns, and the detector that looks at both."""

    def __init__(self, *workers: Worker, decorated: bool = True, **limits: float) -> None:
        self.detector = d.Detector(d.Limits(**limits))
        self.now_s = 1000.0
        self.generation = 0
        self.pulses = {w: d.Pulse(w, -1, 0, d.Activity.STARTING, self.now_s) for w in workers}
        self.paces: list[float] = []
        self.detector.watch(0, workers, self.now_s, decorated=decorated)

    def set(self, worker: Worker, **changes: object) -> None:
        changes.setdefault("progress_s", self.now_s)
        self.pulses[worker] = replace(self.pulses[worker], **changes)  # type: ignore[arg-type]

    def enter(self, *workers: Worker, activity: d.Activity = d.Activity.TRAINING) -> None:
        for worker in workers:
            self.set(worker, generation=self.generation, activity=activity)

    def commit(self, *workers: Worker) -> None:
        for worker in workers:
            pulse = self.pulses[worker]
            self.set(worker, step=pulse.step + 1, commit_s=self.now_s)

    def look(self) -> d.WorkersHung | None:
        found = self.detector.observe(self.pulses.values(), self.now_s)
        if found.pace:
            self.paces.append(found.pace.usual_step_s)
        return found.hung

    def wait(self, seconds: float) -> d.WorkersHung | None:
        """Polls for so long; the first verdict ends it."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + POLL_S)
            hung = self.look()
            if hung:
                return hung
        return None

    def train(self, *workers: Worker, num_steps: int, step_s: float) -> None:
        for _ in range(num_steps):
            assert self.wait(step_s) is None
            self.commit(*workers)
            assert self.look() is None


def test_the_activities_are_those_of_the_page() -> None:
    assert {a.name: a.value for a in d.Activity} == {a.name: a.value for a in page.Activity}


@pytest.mark.parametrize(
    ("usual_s", "longest_s", "expected_s"),
    [
        (0.01, 0.02, 30.0),  # the floor
        (2.0, 2.5, 40.0),  # twenty usual ones
        (2.0, 50.0, 150.0),  # three of the longest
        (200.0, 200.0, 1800.0),  # the ceiling
    ],
)
def test_learned_timeout(usual_s: float, longest_s: float, expected_s: float) -> None:
    assert d.learned_timeout_s(usual_s, longest_s, d.Limits()) == expected_s


def test_a_standstill_is_found_at_the_learned_timeout_and_names_everybody() -> None:
    bench = Bench(A, B)
    bench.enter(A, B)
    bench.train(A, B, num_steps=8, step_s=2.0)
    began_s = bench.now_s
    assert bench.wait(39.8) is None
    hung = bench.wait(0.5)
    assert hung is not None
    assert bench.now_s - began_s == pytest.approx(40.0, abs=2 * POLL_S)
    assert (hung.generation, hung.workers, hung.step) == (0, (A, B), 8)
    assert hung.began_s == began_s
    assert "step 8, training, no progress for 40" in hung.note


def test_who_still_moves_is_not_named() -> None:
    bench = Bench(A, B, hang_timeout_s=5.0)
    bench.enter(A, B)
    bench.train(A, B, num_steps=3, step_s=0.5)
    hung = None
    for _ in range(12):
        hung = hung or bench.wait(0.5)
        bench.commit(B)
    assert hung is not None and hung.workers == (A,)


def test_a_verdict_is_repeated_only_after_as_much_time_again() -> None:
    bench = Bench(A, hang_timeout_s=5.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    assert bench.wait(5.2) is not None
    assert bench.wait(4.8) is None
    assert bench.wait(0.5) is not None


def test_nothing_is_watched_after_stop() -> None:
    bench = Bench(A, hang_timeout_s=5.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    bench.detector.stop()
    assert bench.wait(100.0) is None


@pytest.mark.parametrize(
    "activity",
    [d.Activity.JOINING, d.Activity.BUILDING, d.Activity.RESTORING, d.Activity.TRAINING],
)
def test_until_the_first_commit_the_first_step_limit_holds(activity: d.Activity) -> None:
    bench = Bench(A, hang_timeout_s=5.0, first_step_timeout_s=60.0)
    bench.enter(A, activity=activity)
    assert bench.wait(59.0) is None
    assert bench.wait(2.0) is not None


def test_a_worker_that_never_enters_is_found() -> None:
    """Stopped while it waited at the decorator: its page is still that of an older generation."""
    bench = Bench(A, B, first_step_timeout_s=60.0)
    bench.enter(A, B)
    bench.set(B, generation=-1, activity=d.Activity.WAITING)
    hung = bench.wait(62.0)
    assert hung is not None and B in hung.workers
    assert "not yet in generation 0" in hung.note


def test_a_commit_that_fell_between_two_looks_still_ends_the_first_step() -> None:
    bench = Bench(A, hang_timeout_s=5.0)
    bench.look()
    bench.now_s += 0.09
    bench.enter(A)
    bench.commit(A)
    assert bench.wait(4.8) is None
    assert bench.wait(0.5) is not None


def test_an_old_commit_does_not_end_the_first_step_of_the_next_generation() -> None:
    bench = Bench(A, hang_timeout_s=5.0, first_step_timeout_s=60.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    bench.detector.stop()
    bench.now_s += 0.05
    bench.generation = 1
    bench.detector.watch(1, [A], bench.now_s)
    bench.enter(A)
    assert bench.wait(50.0) is None


def test_before_the_pace_is_known_a_step_may_take_as_long_as_the_first() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.commit(A)
    assert bench.wait(290.0) is None
    assert bench.wait(20.0) is not None


@pytest.mark.parametrize(
    ("own_s", "limit_s"), [(0.0, 120.0), (12.0, 12.0), (500.0, 500.0)], ids=str
)
def test_a_section_has_its_own_limit(own_s: float, limit_s: float) -> None:
    bench = Bench(A, hang_timeout_s=5.0, section_timeout_s=120.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    bench.set(A, activity=d.Activity.SECTION, section="evaluate", section_timeout_s=own_s)
    assert bench.wait(limit_s - 0.5) is None
    hung = bench.wait(1.0)
    assert hung is not None and "section 'evaluate'" in hung.note


def test_a_section_is_no_step_time() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=8, step_s=1.0)
    bench.set(A, activity=d.Activity.SECTION, section="evaluate")
    assert bench.wait(100.0) is None
    bench.set(A, activity=d.Activity.TRAINING, section="")
    bench.train(A, num_steps=1, step_s=1.0)
    assert bench.detector.step_timeout_s == 30.0
    assert bench.detector.usual_step_s == pytest.approx(1.0)


def test_who_waits_for_a_peer_in_a_section_is_excused() -> None:
    """Rank 0 saves alone; the others block in the next step's collective."""
    bench = Bench(A, B, hang_timeout_s=5.0, section_timeout_s=60.0)
    bench.enter(A, B)
    bench.train(A, B, num_steps=3, step_s=0.5)
    bench.set(A, activity=d.Activity.SECTION, section="save")
    assert bench.wait(59.0) is None
    hung = bench.wait(2.0)
    assert hung is not None and hung.workers == (A, B)


def test_who_is_behind_the_section_is_not_excused() -> None:
    """B never came to the section in which A waits for it: A is ahead by the step committed."""
    bench = Bench(A, B, hang_timeout_s=5.0, section_timeout_s=60.0)
    bench.enter(A, B)
    bench.train(A, B, num_steps=3, step_s=0.5)
    bench.commit(A)
    bench.set(A, activity=d.Activity.SECTION, section="evaluate")
    hung = bench.wait(6.0)
    assert hung is not None and hung.workers == (A, B) and hung.step == 3


def test_a_finished_worker_waits_as_long_as_it_likes() -> None:
    bench = Bench(A, B, hang_timeout_s=5.0)
    bench.enter(A, B)
    bench.train(A, B, num_steps=3, step_s=0.5)
    bench.set(A, activity=d.Activity.FINISHED)
    for _ in range(40):
        bench.commit(B)
        assert bench.wait(0.5) is None
    hung = bench.wait(6.0)
    assert hung is not None and hung.workers == (B,)


def test_a_finished_worker_has_to_return_from_main_once_it_was_told() -> None:
    bench = Bench(A, B, hang_timeout_s=5.0, first_step_timeout_s=60.0)
    bench.enter(A, B)
    bench.set(A, activity=d.Activity.FINISHED)
    bench.set(B, activity=d.Activity.FINISHED)
    assert bench.wait(100.0) is None
    bench.detector.close(bench.now_s)
    bench.set(B, activity=d.Activity.STARTING)  # code after main()
    assert bench.wait(59.0) is None
    hung = bench.wait(2.0)
    assert hung is not None and hung.workers == (A,)


@pytest.mark.parametrize("pause_s", [8.0, 3600.0])
def test_a_pause_of_the_whole_machine_is_no_hang(pause_s: float) -> None:
    bench = Bench(A, hang_timeout_s=5.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    assert bench.wait(0.4) is None
    bench.now_s += pause_s  # nobody ran
    assert bench.look() is None
    assert bench.wait(3.0) is None  # at most one quantum was added
    assert bench.wait(2.0) is not None


def test_a_pause_is_no_step_time() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=8, step_s=1.0)
    bench.now_s += 600.0
    assert bench.look() is None
    bench.commit(A)
    assert bench.look() is None
    assert bench.detector.step_timeout_s == 30.0


def test_an_agent_that_is_always_late_still_finds_the_hang() -> None:
    bench = Bench(A, hang_timeout_s=8.0)
    bench.enter(A)
    bench.train(A, num_steps=3, step_s=0.5)
    for _ in range(9):
        bench.now_s += 4.0
        if bench.look():
            return
    pytest.fail("no verdict within the factor at which the agent is starved")


def test_a_long_step_that_passes_after_a_false_alarm_is_remembered() -> None:
    """Someone evaluates for 45 s every so often, without a section."""
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=8, step_s=1.0)
    assert bench.wait(31.0) is not None
    bench.detector.stop()
    bench.generation = 1
    bench.detector.watch(1, [A], bench.now_s)
    bench.enter(A)
    bench.train(A, num_steps=1, step_s=45.0)
    bench.train(A, num_steps=5, step_s=1.0)
    assert bench.detector.step_timeout_s == pytest.approx(135.0, abs=1.0)
    assert bench.wait(45.0) is None


def test_a_first_step_without_a_suspicion_teaches_nothing() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=1, step_s=100.0)
    bench.train(A, num_steps=5, step_s=1.0)
    assert bench.detector.step_timeout_s == 30.0


def test_the_longest_step_is_forgotten_after_a_while() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=5, step_s=1.0)
    bench.train(A, num_steps=1, step_s=20.0)
    bench.train(A, num_steps=200, step_s=0.7)
    assert bench.detector.step_timeout_s == pytest.approx(60.0, abs=1.0)
    for _ in range(2):
        bench.now_s += d.LATELY_S + 1
        assert bench.look() is None
    bench.train(A, num_steps=5, step_s=1.0)
    assert bench.detector.step_timeout_s == 30.0


def test_the_pace_is_told_when_it_has_moved_by_more_than_a_factor_of_two() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=10, step_s=1.0)
    bench.train(A, num_steps=100, step_s=1.5)
    bench.train(A, num_steps=100, step_s=4.0)
    first, second = bench.paces
    assert first == pytest.approx(1.0)
    assert 2.0 < second <= 4.0


def test_many_steps_between_two_looks_count_as_their_mean() -> None:
    bench = Bench(A)
    bench.enter(A)
    bench.train(A, num_steps=2, step_s=0.5)
    for _ in range(20):
        bench.now_s += POLL_S
        bench.set(A, step=bench.pulses[A].step + 10, commit_s=bench.now_s)
        bench.look()
    assert bench.detector.usual_step_s == pytest.approx(0.01)


class TestUnmodified:
    def test_without_an_explicit_timeout_nothing_is_watched(self) -> None:
        bench = Bench(A, decorated=False)
        bench.set(A, ticks=5)
        assert bench.wait(2000.0) is None

    def test_nothing_is_watched_before_the_first_tick(self) -> None:
        bench = Bench(A, decorated=False, hang_timeout_s=5.0)
        assert bench.wait(1000.0) is None

    def test_from_the_first_tick_on_the_timeout_holds(self) -> None:
        bench = Bench(A, decorated=False, hang_timeout_s=5.0)
        bench.wait(10.0)
        bench.set(A, ticks=1)
        bench.look()
        assert bench.wait(4.8) is None
        hung = bench.wait(0.5)
        assert hung is not None and "tick 1" in hung.note

    def test_the_pace_comes_from_ticks(self) -> None:
        bench = Bench(A, decorated=False)
        for _ in range(10):
            bench.wait(2.0)
            bench.set(A, ticks=bench.pulses[A].ticks + 1)
            bench.look()
        assert bench.paces == [pytest.approx(2.0)]


@pytest.mark.parametrize(
    "limits",
    [
        {"hang_timeout_s": 0.0},
        {"hang_timeout_s": float("nan")},
        {"first_step_timeout_s": -1.0},
        {"section_timeout_s": 0.0},
        {"floor_s": 10.0, "ceiling_s": 5.0},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        d.Limits(**limits).check()
