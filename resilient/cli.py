"""The `resilient` command: looks at jobs, and changes nothing.

    resilient report LOGDIR         what happened: steps, recoveries and their phases, time lost
    resilient status [LOGDIR]       the same of a job that runs, with what its ranks do now
    resilient sim run               simulated clusters under random faults, each from a seed
    resilient sim replay JOURNAL    a job's decisions, made again by the core of this release

Exit codes: 0; 1 where a simulated run failed or a decision differs; 2 for a user's mistake, which
is told in one line.

The replay is put together here, because only here both the journal's reader and the simulator are
known.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from resilient import wire
from resilient.core.model import Config
from resilient.errors import ConfigError
from resilient.report import cli as report_cli
from resilient.report.journal import Journal, find_journal, read_journal
from resilient.sim import cli as sim_cli
from resilient.sim.replay import Recorded, difference_text, replay

SHOWN_DIFFERENCES = 10
FIRST_RECORD_LINE = 2
INTERRUPTED = 130  # as a shell says it of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"resilient: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `resilient report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilient", description="Looks at jobs that resilient-run launched, and simulates."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    report_cli.add_commands(commands)
    sim = commands.add_parser("sim", help="runs the decisions of a cluster without a cluster")
    sim_commands = sim.add_subparsers(metavar="COMMAND", required=True)
    sim_cli.add_commands(sim_commands)
    again = sim_commands.add_parser(
        "replay", help="decides a real job again, from its journal, and shows what differs"
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
    journal = read_journal(find_journal(arguments.journal))
    config, notes = read_config(journal)
    records, more_notes = read_records(journal)
    for note in [*notes, *more_notes]:
        print(f"note: {note}")
    began_s = records[0].now_s if records else 0.0
    lines = []
    for difference in replay(config, records, wire.effect_to_json):
        lines.append(difference.recorded.line)
        if arguments.all or len(lines) <= SHOWN_DIFFERENCES:
            print(difference_text(difference, began_s))
    decided = f"{len(records)} decisions"
    if not lines:
        print(f"{decided}: the same today")
        return 0
    if not arguments.all and len(lines) > SHOWN_DIFFERENCES:
        print(f"... and {len(lines) - SHOWN_DIFFERENCES} more (--all shows them)")
    later = "; later ones may follow from it" if len(lines) > 1 else ""
    print(f"{decided}: {len(lines)} otherwise today, the first at line {lines[0]}{later}")
    return 1


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


def read_records(journal: Journal) -> tuple[list[Recorded], list[str]]:
    """The records that can be decided again, and what must be said of the others."""
    records = [
        Recorded(line, record.now_s, record.event, record.phase, record.effects)
        for line, record in enumerate(journal.records, start=FIRST_RECORD_LINE)
        if record.event is not None
    ]
    notes = []
    num_unknown = len(journal.records) - len(records)
    if num_unknown:
        notes.append(f"events not known to this release, and left out: {num_unknown}")
    if journal.num_unreadable:
        notes.append(f"lines that do not read, left out and not counted: {journal.num_unreadable}")
    return records, notes


if __name__ == "__main__":
    sys.exit(main())
