"""Reading a journal: found where jobs put it, and safe against a kill of its writer at any byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilient.core import events as ev
from resilient.errors import ConfigError
from resilient.report import find_journal, read_journal, summarize, summary_text
from tests.report.journals import Job, line


def written(path: Path) -> bytes:
    job = Job(path)
    job.start()
    job.die(3.0, rank=2, step=7)
    for rank in (0, 1, 3):
        job.interrupt(3.1, rank, 7)
    return path.read_bytes()


def test_every_record_is_typed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    num_lines = written(path).count(b"\n")
    journal = read_journal(str(path))
    assert len(journal.records) == num_lines - 1
    assert journal.num_unreadable == 0
    assert journal.records[0].event == ev.NodeJoined("a", 4)
    assert all(record.event is not None for record in journal.records)
    assert journal.header["argv"] == ["resilient-run"]


def test_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    data = written(path)
    header_length = data.index(b"\n") + 1
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    # every byte of the last two lines, and a stride through the rest
    cuts = sorted({*range(header_length, len(data), 97), *range(ends[-3], len(data) + 1)})
    for cut in cuts:
        path.write_bytes(data[:cut])
        journal = read_journal(str(path))
        assert len(journal.records) == data[:cut].count(b"\n") - 1, cut
        assert journal.num_unreadable == 0
        assert summary_text(summarize(journal))


def test_cut_inside_the_header(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    header = line({"version": 1})
    for cut in range(len(header) - 1):
        path.write_bytes(header[:cut])
        with pytest.raises(ConfigError, match="not a journal"):
            read_journal(str(path))
    path.write_bytes(header[:-1])
    assert read_journal(str(path)).records == ()


def test_a_line_in_the_middle_that_does_not_read_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    data = written(path)
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"\x00\xff{\n", *lines[4:]]))
    journal = read_journal(str(path))
    assert journal.num_unreadable == 1
    assert len(journal.records) == len(lines) - 1
    numbers = [record.line for record in journal.records]
    assert numbers == [2, 3, 4, *range(6, len(lines) + 2)], "those of the file, without line 5"
    assert "do not read: 1" in summary_text(summarize(journal))


def test_an_event_of_a_newer_version_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        line({"version": 1})
        + line({"now": 1.0, "event": {"type": "Teleported"}, "phase": "running", "effects": []})
    )
    (record,) = read_journal(str(path)).records
    assert record.event is None
    assert record.unread == "", "that is no mistake"
    assert record.phase == "running"


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"type": "WorkerReady", "worker": 5}, "bad WorkerReady: "),
        ({"type": "Alike", "event": "x"}, ""),
        ({"type": "Alike"}, ""),
        ({"type": []}, ""),
        (None, ""),
        ("text", ""),
    ],
)
def test_an_event_that_does_not_read(tmp_path: Path, event: object, says: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        line({"version": 1}) + line({"now": 1.0, "event": event, "phase": "running", "effects": []})
    )
    (record,) = read_journal(str(path)).records
    assert record.event is None
    assert record.unread.startswith(says)


def test_another_version(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line({"version": 99}))
    with pytest.raises(ConfigError, match="version 99"):
        read_journal(str(path))


def test_the_newest_run_directory_is_found(tmp_path: Path) -> None:
    for age, name in enumerate(["none_new", "none_old"]):
        run = tmp_path / name
        run.mkdir()
        (run / "journal.jsonl").write_bytes(line({"version": 1}))
        os.utime(run / "journal.jsonl", (1000 - age, 1000 - age))
    assert find_journal(str(tmp_path)) == str(tmp_path / "none_new" / "journal.jsonl")
    inside = str(tmp_path / "none_old")
    assert find_journal(inside) == os.path.join(inside, "journal.jsonl")
    assert find_journal(os.path.join(inside, "journal.jsonl")).endswith("none_old/journal.jsonl")


def test_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"journal\.jsonl"):
        find_journal(str(tmp_path))
    with pytest.raises(ConfigError, match="no directory"):
        find_journal(str(tmp_path / "absent"))
