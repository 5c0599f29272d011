"""The journal as it is read: a header, then one record a decision of the coordinator.

The writer appends whole lines, each with one write, and may be killed at any byte. So the one line
that can be incomplete is the last, and it is ignored: what it would have said had no effect that
anybody can rely on. Any other line that does not read is counted, not hidden.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from resilient import wire
from resilient.core.events import Event
from resilient.errors import ConfigError

FILE_NAME = "journal.jsonl"
VERSION = 1


@dataclass(frozen=True)
class Record:
    """One decision.

    Attributes:
        now_s: when, on the agent's monotonic clock.
        event: what had happened; None where a newer version wrote a kind that is not known here,
            or where its content does not read.
        phase: the coordinator's phase after the decision, by its value ("running", ...).
        effects: what was done about it, as JSON values with a "type" each.
        reason: for people.
        line: its number in the file; the header's is 1.
        event_json: the event as the file has it, with a "type"; empty where it is no object.
        unread: what is wrong with the content of an event of a known kind; "": nothing.
    """

    now_s: float
    event: Event | None
    phase: str
    effects: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    line: int = 0
    event_json: dict[str, Any] = field(default_factory=dict)
    unread: str = ""

    def effects_of(self, *names: str) -> list[dict[str, Any]]:
        """The effects of these types, in order."""
        return [effect for effect in self.effects if effect.get("type") in names]


@dataclass(frozen=True)
class Journal:
    """One job's journal.

    Attributes:
        header: the first line: configuration, command line, wall-clock time of the start.
        records: in order.
        num_unreadable: lines other than the last that could not be read.
    """

    path: str = ""
    header: dict[str, Any] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    num_unreadable: int = 0


def find_journal(directory: str) -> str:
    """The newest journal in the directory or in one of its run directories; or the file itself.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isfile(directory):
        return directory
    if not os.path.exists(directory):
        raise ConfigError(f"there is no directory {directory!r}: give the job's log directory")
    if not os.path.isdir(directory):
        raise ConfigError(_neither(directory))
    found = []
    candidates = [directory]
    try:
        with os.scandir(directory) as entries:
            candidates += [entry.path for entry in entries if entry.is_dir()]
    except OSError as error:
        raise ConfigError(f"cannot read the directory {directory!r}: {error.strerror}") from None
    for candidate in candidates:
        path = os.path.join(candidate, FILE_NAME)
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime_ns, path))
    if not found:
        raise ConfigError(
            f"no {FILE_NAME} in {directory!r} or in a directory in it: give the directory that "
            "resilient-run was given with --log-dir, or the one that it names at its start"
        )
    return max(found)[1]


def read_journal(path: str) -> Journal:
    """Reads a journal, of a job that has ended or of one that runs.

    Raises:
        ConfigError: the file cannot be read, or its first line is not a journal's.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(_neither(path))  # to open a pipe would wait for somebody to write
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path!r}: {error.strerror}") from None
    lines = data.split(b"\n")
    torn = lines.pop()  # empty after a complete last line
    if not lines and torn:
        lines, torn = [torn], b""  # a header without its newline: complete or not, json tells
    try:
        header = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or "version" not in header:
        raise ConfigError(f"{path!r} is not a journal: its first line says nothing of a version")
    version = header["version"]
    if type(version) is not int or version != VERSION:
        raise ConfigError(
            f"{path!r} is a journal of version {version!r}; this release reads {VERSION}"
        )
    records, num_unreadable = [], 0
    for number, line in enumerate(lines[1:], start=2):
        record = _parse(line, number)
        if record is None:
            num_unreadable += 1
        else:
            records.append(record)
    return Journal(path, header, tuple(records), num_unreadable)


def _neither(path: str) -> str:
    return (
        f"{path!r} exists, and is neither a journal's file nor a directory: give the job's log "
        "directory, or the journal in it"
    )


def _parse(line: bytes, number: int) -> Record | None:
    try:
        value = json.loads(line)
        now_s = float(value["now"])
        event_value = value["event"]
        phase = str(value["phase"])
        effects = tuple(effect for effect in value.get("effects", ()) if isinstance(effect, dict))
        reason = str(value.get("reason", ""))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    event, unread = None, ""
    try:
        event = wire.event_from_json(event_value)
    except wire.UnknownEvent:
        pass
    except (wire.WireError, TypeError, ValueError, AttributeError) as error:
        unread = str(error)
    event_json = event_value if isinstance(event_value, dict) else {}
    return Record(now_s, event, phase, effects, reason, number, event_json, unread)
