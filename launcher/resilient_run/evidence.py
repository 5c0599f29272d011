"""What can be found out about a process that ended or stands still, for whoever reads the report.

Nothing here decides anything, and nothing raises: evidence that cannot be had is left out.
"""

from __future__ import annotations

import json
import os

from resilient.core.model import ErrorInfo

_STATES = {
    "T": "stopped by a signal (SIGSTOP or a terminal)",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel (disk, network file system or driver)",
    "Z": "ended, but not yet reaped",
}
MAX_TEXT_BYTES = 100_000


def process_state(pid: int | None) -> str:
    """The state letter of /proc, "" when it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int | None) -> bool:
    """Whether the kernel has it stopped, so that it cannot run at all."""
    return process_state(pid) in ("T", "t")


def describe_state(pid: int | None) -> str:
    """Why it cannot move, if the kernel knows; else ""."""
    return _STATES.get(process_state(pid), "")


def num_oom_kills() -> int | None:
    """How often the kernel's out-of-memory killer has struck in this process's cgroup."""
    try:
        with open("/proc/self/cgroup") as file:
            paths = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in paths:
        if controllers == "":
            found = _read_counter(f"/sys/fs/cgroup{path}/memory.events", "oom_kill")
        elif "memory" in controllers.split(","):
            found = _read_counter(f"/sys/fs/cgroup/memory{path}/memory.oom_control", "oom_kill")
        else:
            continue
        if found is not None:
            return found
    return None


def _read_counter(path: str, name: str) -> int | None:
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def read_error_file(path: str) -> ErrorInfo | None:
    """The exception a worker has left behind (torch elastic's format), if any."""
    try:
        if not path or os.path.getsize(path) > 4 * MAX_TEXT_BYTES:
            return None
        with open(path) as file:
            message = json.load(file)["message"]
        if isinstance(message, str):
            return ErrorInfo(message.partition(":")[0], "", message[:MAX_TEXT_BYTES])
        extra = message.get("extraInfo", {})
        text = str(extra.get("py_callstack", message.get("message", "")))
        name = str(extra.get("type_name") or str(message.get("message", "")).partition(":")[0])
        return ErrorInfo(name, str(extra.get("frame", "")), text[-MAX_TEXT_BYTES:])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
