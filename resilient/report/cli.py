"""`resilient report` and `resilient status`: a job that was, and a job that is.

    resilient report LOGDIR      what happened: steps, recoveries and their phases, time lost
    resilient status [LOGDIR]    the same of a job that runs, with what its ranks do now

Each command is a function of its arguments that prints and returns the exit code.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import socket
import tempfile
from typing import Any

from resilient.core.model import Fault
from resilient.errors import ConfigError
from resilient.report.journal import find_journal, read_journal
from resilient.report.summary import Recovery, Summary, summarize
from resilient.report.text import fault_text, summary_text

STATUS_SOCKET = "status.sock"
STATUS_TIMEOUT_S = 3.0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="what happened in a job, from its journal")
    report.add_argument("logdir", metavar="LOGDIR", help="the job's log directory, or its journal")
    report.add_argument("--json", action="store_true", help="the numbers as one JSON object")
    report.set_defaults(command=_report)
    status = commands.add_parser("status", help="what a job is doing now")
    status.add_argument(
        "logdir",
        metavar="LOGDIR",
        nargs="?",
        help="the job's log directory (default: the newest job in the temporary directory)",
    )
    status.set_defaults(command=_status)


def _report(arguments: argparse.Namespace) -> int:
    path = find_journal(arguments.logdir)
    summary = summarize(read_journal(path))
    if arguments.json:
        print(json.dumps(summary_to_json(summary), indent=2))
        return 0
    print(summary_text(summary))
    if path != arguments.logdir:  # of several journals there, the newest
        print(f"journal: {path}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    path = find_journal(arguments.logdir) if arguments.logdir else _newest_default_journal()
    summary = summarize(read_journal(path))
    now = _ask(os.path.join(os.path.dirname(path), STATUS_SOCKET))
    if now is not None:
        print(_now_text(now))
    elif summary.outcome is None:
        print("no agent answers: the job was killed")
    print(summary_text(summary))
    if path != arguments.logdir:
        print(f"journal: {path}")
    return 0


def _now_text(now: dict[str, Any]) -> str:
    """What the agent said, one line a rank. Whatever a newer agent leaves out is left out."""
    lines = [
        f"now: {now.get('phase', '?')}, generation {now.get('generation', '?')}, "
        f"{now.get('world_size', '?')} ranks, {now.get('spares', '?')} spares"
    ]
    pids = now.get("pids") or {}
    for rank, step in sorted((now.get("steps") or {}).items(), key=lambda item: int(item[0])):
        lines.append(f"  rank {rank}: {step} steps, pid {pids.get(rank, '?')}")
    return "\n".join(lines)


def _newest_default_journal() -> str:
    """Where the launcher puts the logs of a job without --log-dir."""
    pattern = os.path.join(tempfile.gettempdir(), "torchelastic_*", "*", "journal.jsonl")
    found = []
    for path in glob.glob(pattern):
        try:
            found.append((os.stat(path).st_mtime_ns, path))
        except OSError:
            continue  # removed since
    if not found:
        raise ConfigError("no job was started without --log-dir here: name the log directory")
    return max(found)[1]


def _ask(path: str) -> dict[str, Any] | None:
    """What the agent says of the present, a JSON object; None when no agent answers there."""
    try:
        # A path of a socket is at most 107 bytes; by descriptor its length does not matter.
        directory = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(STATUS_TIMEOUT_S)
            client.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
            chunks = []
            while chunk := client.recv(65536):
                chunks.append(chunk)
        value = json.loads(b"".join(chunks))
        return value if isinstance(value, dict) else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(directory)


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """The numbers for other tools. Times in seconds."""
    return {
        "outcome": summary.outcome.value if summary.outcome else None,
        "phase": summary.phase,
        "reason": summary.reason,
        "root_cause": _fault_to_json(summary.root_cause),
        "num_steps": summary.num_steps,
        "num_generations": summary.num_generations,
        "world_size": summary.world_size,
        "startup_s": summary.startup_s,
        "training_s": summary.training_s,
        "lost_s": summary.lost_s,
        "effective_training_time_ratio": summary.effective_ratio,
        "recoveries": [_recovery_to_json(recovery) for recovery in summary.recoveries],
    }


def _recovery_to_json(recovery: Recovery) -> dict[str, Any]:
    return {
        "causes": [_fault_to_json(fault) for fault in recovery.causes],
        "num_collateral": len(recovery.collateral),
        "step": recovery.step,
        "resume_step": recovery.resume_step,
        "generation": recovery.generation,
        "world_size": recovery.world_size,
        "total_s": recovery.total_s,
        "phases_s": {name.replace(" ", "_"): span_s for name, span_s in recovery.phases.items()},
    }


def _fault_to_json(fault: Fault | None) -> dict[str, Any] | None:
    if fault is None:
        return None
    return {
        "kind": fault.kind.value,
        "rank": fault.rank,
        "step": fault.step,
        "status": fault.status,
        "text": fault_text(fault),
    }
