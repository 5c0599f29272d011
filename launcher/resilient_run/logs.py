"""Where each worker's output goes: torch elastic's log specs, and own names for replacements.

    <log dir>/<run id>_xxxx/             the run directory; journal.jsonl and status.sock too
        attempt_0/                       one for each restart of an unmodified script
            0/ 1/ ...                    by local rank: the processes the attempt began with
                stdout.log  stderr.log   if redirected or teed
                error.json               the exception that ended it
                stacks.txt               stacks of a crash or a hang
            worker_7/                    spares and replacements, by the number of the worker
            2/worker_7 -> ../worker_7    the worker that took over local rank 2

Nothing is ever wiped or shared: a replacement has its own files, and a link tells whom it replaced.
A spare does not know which local rank it will take, so its streams go to files if any local rank's
do, and are shown, once it has a rank, the way that rank's are.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

NUM_LAST_LINES = 12
LAST_BYTES = 16_384


@dataclass(frozen=True)
class WorkerLogs:
    """Files of one worker; stdout and stderr are "" where the stream is the agent's own."""

    directory: str
    stdout: str = ""
    stderr: str = ""
    error_file: str = ""

    @property
    def stacks(self) -> str:
        return os.path.join(self.directory, "stacks.txt")

    def last_lines(self) -> str:
        """The end of what it wrote to stderr, if that is in a file."""
        if not self.stderr or self.stderr == os.devnull:
            return ""
        return _last_lines(self.stderr)


@dataclass(frozen=True)
class LogOptions:
    """The options of torchrun that concern output.

    Attributes:
        prefix: template of the prefix of teed lines, "" for torchrun's own ([role0]:).
    """

    specs: LogsSpecs
    role: str
    prefix: str = ""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()


@dataclass
class _Attempt:
    destinations: LogsDest
    directory: str
    tails: list[TailLog] = field(default_factory=list)
    files: list[TextIO] = field(default_factory=list)


class Logs:
    """All the log files of a run."""

    def __init__(self, options: LogOptions, num_slots: int, run_id: str) -> None:
        self._options = options
        self._num_slots = num_slots
        self._run_id = run_id
        self._attempts: dict[int, _Attempt] = {}
        self._begin_attempt(0)
        first = self._attempts[0].directory
        self.run_directory = os.path.dirname(first)

    def _begin_attempt(self, number: int) -> _Attempt:
        environments: dict[int, dict[str, str]] = {
            local_rank: {
                "TORCHELASTIC_RUN_ID": self._run_id,
                "TORCHELASTIC_RESTART_COUNT": str(number),
                "RANK": str(local_rank),
                "LOCAL_RANK": str(local_rank),
            }
            for local_rank in range(self._num_slots)
        }
        destinations = self._options.specs.reify(environments)
        error_file = destinations.error_files.get(0, "")
        if error_file and error_file != os.devnull:
            directory = os.path.dirname(os.path.dirname(error_file))
        else:  # --log-dir /dev/null: the files we cannot do without
            directory = os.path.join(tempfile.mkdtemp(prefix="resilient_"), f"attempt_{number}")
            os.makedirs(directory)
        attempt = _Attempt(destinations, directory)
        self._attempts[number] = attempt
        options = self._options
        for name, filters, console, files in (
            ("stdout", options.stdout_filters, sys.stdout, destinations.tee_stdouts),
            ("stderr", options.stderr_filters, sys.stderr, destinations.tee_stderrs),
        ):
            attempt.tails.append(
                TailLog(options.role, files, console, self._prefixes(files)).start()
            )
            path = getattr(destinations, f"filtered_{name}", "")
            if filters and path and not path.startswith(os.devnull):
                file = open(path, "w", errors="replace", buffering=1)
                attempt.files.append(file)
                tail = TailLog(
                    options.role,
                    files,
                    file,
                    self._prefixes(files),
                    log_line_filter=lambda line, wanted=filters: any(w in line for w in wanted),  # type: ignore[misc]
                )
                attempt.tails.append(tail.start())
        return attempt

    def _prefixes(self, local_ranks: Mapping[int, object]) -> dict[int, str] | None:
        if not self._options.prefix:
            return None
        template = Template(self._options.prefix)
        return {
            n: template.safe_substitute(role_name=self._options.role, rank=n, local_rank=n)
            for n in local_ranks
        }

    # ------------------------------------------------------------ files of one worker

    def of_slot(self, attempt_number: int, local_rank: int) -> WorkerLogs:
        """For the process an attempt begins with in this place."""
        attempt = self._attempts.get(attempt_number) or self._begin_attempt(attempt_number)
        directory = os.path.join(attempt.directory, str(local_rank))
        os.makedirs(directory, exist_ok=True)
        destinations = attempt.destinations
        return WorkerLogs(
            directory,
            destinations.stdouts.get(local_rank, ""),
            destinations.stderrs.get(local_rank, ""),
            destinations.error_files.get(local_rank, ""),
        )

    def of_worker(self, attempt_number: int, number: int) -> WorkerLogs:
        """For a spare or a replacement: a directory by its own number."""
        attempt = self._attempts[attempt_number]
        directory = os.path.join(attempt.directory, f"worker_{number}")
        os.makedirs(directory, exist_ok=True)
        files = {}
        for name in ("stdout", "stderr"):
            paths = getattr(attempt.destinations, name + "s")
            to_file = any(path and path != os.devnull for path in paths.values())
            nowhere = bool(paths) and all(path == os.devnull for path in paths.values())
            files[name] = os.path.join(directory, f"{name}.log") if to_file else ""
            files[name] = os.devnull if nowhere else files[name]
        return WorkerLogs(directory, **files, error_file=os.path.join(directory, "error.json"))

    def take_slot(self, attempt_number: int, logs: WorkerLogs, local_rank: int) -> None:
        """A worker with files of its own has a rank now: shows them as that place's are shown."""
        attempt = self._attempts[attempt_number]
        link = os.path.join(attempt.directory, str(local_rank), os.path.basename(logs.directory))
        try:
            os.symlink(os.path.join("..", os.path.basename(logs.directory)), link)
        except OSError:
            pass  # a convenience only
        destinations = attempt.destinations
        for path, teed, original, console in (
            (logs.stdout, destinations.tee_stdouts, destinations.stdouts, sys.stdout),
            (logs.stderr, destinations.tee_stderrs, destinations.stderrs, sys.stderr),
        ):
            if not path or path == os.devnull:
                continue
            if local_rank in teed:
                prefixes = self._prefixes({local_rank: path})
            elif original.get(local_rank, "") == "":
                prefixes = {local_rank: ""}
            else:
                continue
            tail = TailLog(self._options.role, {local_rank: path}, console, prefixes)
            attempt.tails.append(tail.start())

    def close(self) -> None:
        """Shows what is left to show; every writer is gone. May take a tenth of a second."""
        for attempt in self._attempts.values():
            for tail in attempt.tails:
                tail.stop()
            for file in attempt.files:
                file.close()
            attempt.tails, attempt.files = [], []


def _last_lines(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-NUM_LAST_LINES:])
