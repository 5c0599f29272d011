"""The `resilient` command: looks at jobs, and changes nothing.

    resilient report LOGDIR         what happened: steps, recoveries and their phases, time lost
    resilient status [LOGDIR]       the same of a job that runs, with what its ranks do now
    resilient sim run               simulated clusters under random faults, each from a seed
    resilient sim replay JOURNAL    a job's decisions, made again by the core of this release

Exit codes: 0; 1 where a simulated run failed or a decision differs, whether or not anybody reads
what is printed; 2 for a user's mistake, which is told in one line (after the usage, where it is in
the command line itself).

The replay is put together here, because only here both the journal's reader and the simulator are
known.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from resilient import wire
from resilient.core.model import Config
from resilient.errors import ConfigError
from resilient.report import cli as report_cli
from resilient.report.journal import Journal, Record, find_journal, read_journal
from resilient.sim import cli as sim_cli
from resilient.sim.replay import Recorded, Replayed, difference_text, fields_of_one, replay

SHOWN_DIFFERENCES = 10
SHOWN_UNREAD = 3
INTERRUPTED = 130  # as a shell says it of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    code = 0
    try:
        code = command(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"resilient: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `resilient report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilient", description="Looks at jobs that resilient-run launched, and simulates."
    )
    parser.add_argument("--version", action="version", version=f"resilient {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    report_cli.add_commands(commands)
    sim = commands.add_parser(
        "sim",
        help="runs the decisions of a cluster without a cluster",
        description="Runs the functions that decide in a real job, without a cluster: under random "
        "faults (run), or with the events of a job that was (replay).",
        epilog="Exit code: 0 every promise was kept, or every decision is the same; 1 not so; "
        "2 the command line or the file is wrong.",
    )
    sim_commands = sim.add_subparsers(metavar="COMMAND", required=True)
    sim_cli.add_commands(sim_commands)
    again = sim_commands.add_parser(
        "replay",
        help="decides a real job again, from its journal, and shows what differs",
        description="Gives the events of a job's journal to the core of this release, and shows "
        "where it decides otherwise than the one that ran the job.",
        epilog="Exit code: 0 every decision is the same, 1 some differ, 2 the command line or the "
        "journal is wrong.",
    )
    again.add_argument(
        "journal", metavar="JOURNAL", help="a journal, or the log directory of a job"
    )
    again.add_argument(
        "--all",
        action="store_true",
        help=f"show every difference (default: the first {SHOWN_DIFFERENCES})",
    )
    again.set_defaults(command=_replay)
    return parser


# ---------------------------------------------------------------- replay


def _replay(arguments: argparse.Namespace) -> int:
    path = find_journal(arguments.journal)
    journal = read_journal(path)
    config, notes = read_config(journal)
    records, of_one, more_notes = read_records(journal)
    replayed = replay(config, records, wire.effect_to_json)
    if not records:
        raise ConfigError(_nothing_text(journal))
    if path != arguments.journal:  # of several journals there, the newest
        print(f"journal: {path}")
    of_one += replayed.of_one
    if of_one:
        more_notes.append(
            "fields that only one of the two releases knows, not compared: "
            + ", ".join(f"{name} ({_times(count)})" for name, count in sorted(of_one.items()))
        )
    try:
        for note in [*notes, *more_notes]:
            print(f"note: {note}")
        _print_differences(replayed, records, arguments.all)
    except BrokenPipeError:
        pass  # the result is known, whoever reads it
    return 1 if replayed.differences else 0


def _print_differences(replayed: Replayed, records: Sequence[Recorded], every: bool) -> None:
    found = replayed.differences
    shown = found if every else found[:SHOWN_DIFFERENCES]
    for difference in shown:
        print(difference_text(difference, records[0].now_s))
    decided = f"{len(records)} {'decision' if len(records) == 1 else 'decisions'}"
    if not found:
        print(f"{decided}: the same today")
        return
    if len(found) > len(shown):
        print(f"... and {len(found) - len(shown)} more (--all shows them)")
    later = "; later ones may follow from it" if len(found) > 1 else ""
    first = found[0].recorded.line
    print(f"{decided}: {len(found)} otherwise today, the first at line {first}{later}")


def _nothing_text(journal: Journal) -> str:
    if journal.records or journal.num_unreadable:
        return f"{journal.path!r} has no decision that this release can read"
    return f"{journal.path!r} has no decision in it: nothing had happened yet"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def read_config(journal: Journal) -> tuple[Config, list[str]]:
    """The job's configuration, and what must be said of it: one that another release wrote has
    fields that this one does not know, or lacks some.

    Raises:
        ConfigError: there is none, or a value that is not of its field's type.
    """
    value = journal.header.get("config")
    if not isinstance(value, dict):
        raise ConfigError(f"{journal.path!r} says nothing of the job's configuration")
    known = {field.name for field in dataclasses.fields(Config)}
    try:
        config = msgspec.convert({key: value[key] for key in value if key in known}, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration in {journal.path!r} does not read: {error}") from None
    notes = []
    if unknown := sorted(value.keys() - known):
        notes.append(f"not known to this release, and left out: {', '.join(unknown)}")
    if missing := sorted(known - value.keys()):
        notes.append(f"not known to the release that ran the job, defaults: {', '.join(missing)}")
    return config, notes


def read_records(journal: Journal) -> tuple[list[Recorded], Counter[str], list[str]]:
    """The records that can be decided again; the fields of their events that only one release
    knows, with how often; and what must be said of the other records."""
    records, unread = [], []
    num_unknown = 0
    of_one: Counter[str] = Counter()
    for record in journal.records:
        if record.event is not None:
            records.append(
                Recorded(record.line, record.now_s, record.event, record.phase, record.effects)
            )
            of_one.update(fields_of_one(record.event_json, wire.event_to_json(record.event)))
        elif record.unread:
            unread.append(record)
        else:
            num_unknown += 1
    notes = []
    if num_unknown:
        notes.append(f"events not known to this release, and left out: {num_unknown}")
    if unread:
        notes.append(
            f"events that do not read, and left out: {len(unread)}: {_unread_text(unread)}"
        )
    if journal.num_unreadable:
        notes.append(f"lines that do not read, left out and not counted: {journal.num_unreadable}")
    return records, of_one, notes


def _unread_text(records: Sequence[Record]) -> str:
    told = [f"line {record.line}, {record.unread}" for record in records[:SHOWN_UNREAD]]
    return "; ".join(told + ["..."] * (len(records) > SHOWN_UNREAD))


def _version() -> str:
    try:
        return importlib.metadata.version("resilient")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree that is not installed"


if __name__ == "__main__":
    sys.exit(main())
