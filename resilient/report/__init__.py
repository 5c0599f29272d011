"""What happened in a job, from its journal: numbers, and a short text for people.

Three steps, each its own module: `journal` reads lines, `summary` makes numbers of them, `text`
puts the numbers into words. The command line is in `cli`. Nothing here talks to a running job, and
nothing here decides: which fault was the cause is asked of the core, as the agent asks it.

    from resilient.report import find_journal, read_journal, summarize, summary_text
    print(summary_text(summarize(read_journal(find_journal("logs")))))
"""

from __future__ import annotations

from resilient.report.journal import Journal, Record, find_journal, read_journal
from resilient.report.summary import Phases, Recovery, Summary, summarize
from resilient.report.text import summary_text

__all__ = [
    "Journal",
    "Phases",
    "Record",
    "Recovery",
    "Summary",
    "find_journal",
    "read_journal",
    "report_text",
    "summarize",
    "summary_text",
]


def report_text(directory: str) -> str:
    """The report on the newest job under that log directory, as several lines of plain text.

    Raises:
        ConfigError: there is no journal.
    """
    return summary_text(summarize(read_journal(find_journal(directory))))
