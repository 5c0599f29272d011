"""A journal, decided again: the same by the same core, and told where a core decides otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from resilient.cli import main
from resilient.core import coordinator
from resilient.core.model import Config
from resilient.errors import ConfigError
from resilient.report import read_journal
from resilient.sim.replay import brief
from tests.report.journals import Job, code_without_a_reader, line
from tests.sim.mutants import resume_too_early
from tests.sim.record import RECORDED, run_job

HOW = f"""today's core decides otherwise than it did in a recorded job. To look at it:
    resilient sim replay {RECORDED.relative_to(RECORDED.parents[3])}
If every difference is meant, record a job of today's core in its place:
    python -m tests.sim.record
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A job of four ranks that lost one, and went on."""
    job = Job(tmp_path / "journal.jsonl")
    job.start()
    job.die(3.0, rank=2, step=40, began_s=2.9)
    for rank in (0, 1, 3):
        job.interrupt(3.1, rank, 40)
    job.enter(3.1, joined_s=3.2, restored_s=3.3)
    job.step_all(3.4, 41)
    job.finish(5.0, 60)
    change(job.path, 1, lambda header: header.update(config=asdict(Config())))
    return job.path


def change(path: Path, number: int, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits one line of a journal, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    value = json.loads(lines[number - 1])
    edit(value)
    lines[number - 1] = line(value)
    path.write_bytes(b"".join(lines))


def line_of(path: Path, name: str, nth: int = 0) -> int:
    """The number of the nth line with such an event."""
    lines = path.read_text().splitlines()
    return [n for n, text in enumerate(lines, 1) if f'"type":"{name}"' in text.replace(" ", "")][
        nth
    ]


# ---------------------------------------------------------------- real jobs


def test_a_recorded_job_is_decided_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["sim", "replay", str(RECORDED)])
    out = capsys.readouterr().out
    assert code == 0, HOW + out
    assert "decisions: the same today" in out
    assert "note:" not in out, HOW + out
    assert "not compared" not in out, "every field of today is in it, and no other"
    text = RECORDED.read_text()
    assert '"status":-9,"step":5' in text, "the recorded job has a kill"
    assert text.count('"type":"PublishPlan"') == 2, "and a recovery"


def test_a_changed_core_is_noticed_on_the_recorded_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_too_early(monkeypatch)
    assert main(["sim", "replay", str(RECORDED)]) == 1
    assert "cut.step: 5 then, 4 today" in capsys.readouterr().out


def test_a_real_job_is_decided_the_same_and_by_a_broken_core_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_job(tmp_path)
    num_decisions = len(path.read_text().splitlines()) - 1
    assert main(["sim", "replay", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert out == f"journal: {path}\n{num_decisions} decisions: the same today\n"
    resume_too_early(monkeypatch)
    assert main(["sim", "replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "differs in effects[0].plan.cut.step: 5 then, 4 today" in out
    assert "otherwise today, the first at line" in out


# ---------------------------------------------------------------- what is told


def test_the_same_everywhere(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "replay", str(journal)]) == 0
    assert capsys.readouterr().out.endswith(" decisions: the same today\n")


def test_a_difference_in_the_phase(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record.update(phase="running", effects=[]))
    assert main(["sim", "replay", str(journal)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:7] == [
        f"line {number}, at 3.000 s: WorkerExited(worker=a/2, status=-9, step=40, began_s=2.9)",
        "  then:  running",
        "    > nothing",
        "  today: stopping",
        "    > AbortGeneration(generation=0, workers=[a/0, a/1, a/3], "
        "reason=rank 2 was killed by signal 9)",
        "  differs in phase: running then, stopping today",
        "  today's reason: rank 2 was killed by signal 9",
    ]
    assert len(out) == 8, "it goes on with today's state, in which all the others are the same"
    assert out[7].endswith(f" decisions: 1 otherwise today, the first at line {number}")


def test_a_difference_in_the_effects(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record["effects"][0]["workers"].pop())
    assert main(["sim", "replay", str(journal)]) == 1
    assert "differs in effects[0].workers: 2 of them then, 3 today" in capsys.readouterr().out
    change(journal, number, lambda record: record["effects"].clear())
    assert main(["sim", "replay", str(journal)]) == 1
    assert "differs in effects: 0 of them then, 1 today" in capsys.readouterr().out


def test_texts_and_fields_of_other_releases_are_no_difference(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = line_of(journal, "WorkerExited")
    effect = {"type": "AbortGeneration", "workers": [["a", 0], ["a", 1], ["a", 3]], "added": 1}
    effect["reason"] = "said otherwise"  # and no "generation", as if that had been added since
    change(journal, number, lambda record: record.update(effects=[effect], reason="in short"))
    assert main(["sim", "replay", str(journal)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "note: fields that only one of the two releases knows, not compared: "
        "AbortGeneration.added (once), AbortGeneration.generation (once)"
    )
    assert out[1].endswith("the same today")


def test_what_is_missing_everywhere_is_counted(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An effect without its content, an event with more or less than it has today."""
    for nth in range(2):
        change(
            journal,
            line_of(journal, "PublishPlan", nth),
            lambda record: [effect.pop("plan", None) for effect in record["effects"]],
        )
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record["event"].update(mood="bad"))
    change(journal, number, lambda record: record["event"].pop("note", None))
    assert main(["sim", "replay", str(journal)]) == 0
    note = capsys.readouterr().out.splitlines()[0]
    assert note.startswith("note: fields that only one of the two releases knows, not compared: ")
    assert "PublishPlan.plan (2 times)" in note
    assert "WorkerExited.mood (once)" in note


def test_an_effect_without_a_type_is_a_difference(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record.update(effects=[{}]))
    assert main(["sim", "replay", str(journal)]) == 1
    assert "effects[0].type: None then, AbortGeneration today" in capsys.readouterr().out


def test_the_first_ten_or_all(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_records = len(journal.read_text().splitlines()) - 1
    for number in range(2, 2 + num_records):
        change(journal, number, lambda record: record.update(phase="other"))
    assert main(["sim", "replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert out.count("differs in phase") == 10
    assert f"... and {num_records - 10} more (--all shows them)" in out
    assert f"{num_records} otherwise today, the first at line 2; later ones may follow" in out
    assert main(["sim", "replay", "--all", str(journal)]) == 1
    out = capsys.readouterr().out
    assert out.count("differs in phase") == num_records
    assert "--all" not in out


def test_a_core_that_fails_is_a_difference(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = coordinator.step

    def failing(state: Any, event: Any, now_s: float) -> Any:
        if type(event).__name__ == "WorkerExited" and event.status == -9 and event.step:
            raise KeyError("no such thing")
        return step(state, event, now_s)

    monkeypatch.setattr(coordinator, "step", failing)
    assert main(["sim", "replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert "  today: raised an error" in out
    assert "  differs in phase: stopping then, KeyError: 'no such thing' today" in out


# ---------------------------------------------------------------- other releases, other files


def test_configuration_of_another_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "journal.jsonl", num_spares=0)
    job.start()
    job.die(3.0, rank=1, step=40)
    config = {"num_spares": 0, "num_moons": 2}
    change(job.path, 1, lambda header: header.update(config=config))
    assert main(["sim", "replay", str(job.path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "note: not known to this release, and left out: num_moons"
    assert out[1].startswith("note: not known to the release that ran the job, defaults: grace_s, ")
    assert len(out) == 3
    change(job.path, 1, lambda header: header["config"].update(num_spares=1))
    assert main(["sim", "replay", str(job.path)]) == 1, "the configuration is the job's own"


def test_events_that_are_not_known_are_counted(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"now": 6.0, "event": {"type": "MoonRose"}, "phase": "closed", "effects": []}
    with journal.open("ab") as file:
        file.write(line(record) * 2)
    assert main(["sim", "replay", str(journal)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("note: events not known to this release, and left out: 2\n")


def test_events_that_do_not_read_are_told_with_their_lines(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = len(journal.read_text().splitlines())
    change(journal, number, lambda record: record["event"].update(worker="nobody"))
    assert main(["sim", "replay", str(journal)]) == 0
    note, last = capsys.readouterr().out.splitlines()
    assert note.startswith(
        f"note: events that do not read, and left out: 1: line {number}, bad WorkerExited: "
    )
    assert last == f"{number - 2} decisions: the same today"


def test_lines_are_those_of_the_file(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record.update(phase="running"))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], b"}{\n", *lines[3:]]))
    assert main(["sim", "replay", str(journal)]) == 1
    out = capsys.readouterr().out
    assert f"\nline {number + 1}, at 3.000 s: " in out
    assert out.rstrip().endswith(f"the first at line {number + 1}")


def test_a_journal_without_a_decision_proves_nothing(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = journal.read_bytes().splitlines(keepends=True)[0]
    for more, says in [(b"", "nothing had happened yet"), (b"}{\n", "that this release can read")]:
        journal.write_bytes(header + more)
        assert main(["sim", "replay", str(journal)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert says in captured.err


@pytest.mark.parametrize("every", [[], ["--all"]])
def test_the_exit_code_is_that_of_the_result_whoever_reads_on(
    journal: Path, every: list[str]
) -> None:
    number = line_of(journal, "WorkerExited")
    change(journal, number, lambda record: record.update(phase="x" * 100_000))
    assert code_without_a_reader(["sim", "replay", str(journal), *every]) == 1
    change(journal, number, lambda record: record.update(phase="stopping"))
    assert code_without_a_reader(["sim", "replay", str(journal), *every]) == 0


def test_torn_and_unreadable_lines(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = journal.read_bytes()
    num_records = whole.count(b"\n") - 1
    journal.write_bytes(whole[:-20])
    assert main(["sim", "replay", str(journal)]) == 0
    assert capsys.readouterr().out == f"{num_records - 1} decisions: the same today\n"
    journal.write_bytes(whole + b"}{\n")
    assert main(["sim", "replay", str(journal)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("note: lines that do not read, left out and not counted: 1\n")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"argv": []}, "is not a journal"),
        ({"version": 99}, "is a journal of version 99"),
        ({"version": 1}, "says nothing of the job's configuration"),
        ({"version": 1, "config": {"num_spares": "many"}}, "does not read"),
        ({"version": 1, "config": {"num_spares": -1}}, "must not be negative"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, header: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(header))
    assert main(["sim", "replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out.replace("note:", "") == "" or "defaults" in captured.out
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_no_journal_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "replay", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("resilient: there is no directory")


def test_what_is_no_file_is_told_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody will ever write into the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in (["sim", "replay"], ["report"], ["status"]):
        for path in (pipe, "/dev/null"):
            assert main([*command, str(path)]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.count("\n") == 1
            assert "neither a journal's file nor a directory" in captured.err
    os.mkfifo(tmp_path / "journal.jsonl")
    assert main(["sim", "replay", str(tmp_path)]) == 2
    with pytest.raises(ConfigError, match="neither"):
        read_journal(str(pipe))


def test_values_are_shown_in_one_short_line() -> None:
    assert brief({"type": "Stop", "workers": [["a", 1]], "reason": "", "plan": None}) == (
        "Stop(workers=[a/1])"
    )
    assert brief(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, ... 12 more]"
    assert brief("one\n two") == "one two"
    assert len(brief("x" * 1000)) < 80


def test_a_plan_is_shown_with_its_ranks_and_its_cut() -> None:
    members = [{"rank": rank, "slot": ["a", rank], "worker": ["a", rank]} for rank in range(3)]
    cut = {"kind": "memory", "step": 5, "holders": [0, 2]}
    plan = {"generation": 4, "members": members, "store": ["a", 1], "cut": cut}
    shown = brief({"type": "PublishPlan", "plan": plan})
    assert shown == "PublishPlan(plan=4[0=a/0 1=a/1 2=a/2] memory 5 from [0, 2])"
    many = brief({**plan, "members": members * 100, "cut": {**cut, "holders": []}})
    assert many.endswith("... 292 more] memory 5")
