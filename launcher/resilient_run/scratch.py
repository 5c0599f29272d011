"""Short-lived files of the job, kept together so that nothing is left of whoever was killed.

The one idea: what a process would remove at its own orderly end must be found by somebody else.
multiprocessing gives every process that needs a socket (a data-loader worker, for one) a temporary
directory; so each worker of ours, with all that it forks, is given one, below one of the job's.
torch makes a file in /dev/shm for each tensor that is handed over, and unlinks it once the memory
is allocated: a SIGKILL in between leaves the memory in use for good. Its name tells the process,
so every process of a worker leaves its number in the worker's directory.

The zygote makes the job's directory, and removes it at the end, however the agent has come to its
own; the agent removes that of a worker a little after its end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable

from resilient_run import evidence

VARIABLE = "RESILIENT_SCRATCH"
MAX_PATH_BYTES = 107 - len("/12345/listener-xxxxxxxx")  # names of Unix sockets are that short
_MARK = "process-"
_SHARED_MEMORY = "/dev/shm"
_WAIT_DEAD_S = 1.0

_of_this_worker = ""


def new_path() -> str:
    """A path for the job's directory, where nothing is yet; "" if every path is too long."""
    name = f"resilient-{os.getpid()}-{secrets.token_hex(4)}"
    for directory in (tempfile.gettempdir(), "/tmp"):
        path = os.path.join(directory, name)
        if len(os.fsencode(path)) <= MAX_PATH_BYTES and os.access(directory, os.W_OK):
            return path
    return ""


def make(path: str) -> None:
    """Makes it, for this user alone. Where that fails, everybody does as without it."""
    if path:
        try:
            os.mkdir(path, 0o700)
        except OSError:
            pass


def of_worker(path: str, number: int) -> str:
    return os.path.join(path, str(number)) if path else ""


# ---------------------------------------------------------------- in a worker


def use_in_this_process() -> None:
    """Has multiprocessing use it here, and in every process that is started from here."""
    global _of_this_worker
    path = os.environ.pop(VARIABLE, "")
    try:
        if path:
            os.mkdir(path, 0o700)
    except OSError:
        return
    if path:
        from multiprocessing import process

        # What multiprocessing.util.get_temp_dir looks at first; children inherit a copy.
        process.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]
        _of_this_worker = path
        note_this_process()


def note_this_process() -> None:
    """In a worker, and in every process that was forked from one."""
    if _of_this_worker:
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        try:
            os.close(os.open(f"{_of_this_worker}/{_MARK}{os.getpid()}", flags, 0o600))
        except OSError:
            pass


# ---------------------------------------------------------------- afterwards


def remove_of_worker(path: str) -> None:
    """What a worker that has ended had; except while a process of it lives, which may need it."""
    pids = _pids_in(path)
    if path and not any(map(_is_alive, pids)):
        _free_shared_memory(pids)
        shutil.rmtree(path, ignore_errors=True)


def remove(path: str) -> None:
    """All of it, when every worker has ended or was killed. Waits a moment for the killed."""
    if not path or not os.path.isdir(path):
        return
    pids = {pid for entry in _names_in(path) for pid in _pids_in(os.path.join(path, entry))}
    deadline_s = time.monotonic() + _WAIT_DEAD_S
    while any(map(_is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    _free_shared_memory(pid for pid in pids if not _is_alive(pid))
    shutil.rmtree(path, ignore_errors=True)


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _pids_in(path: str) -> set[int]:
    marks = [n.removeprefix(_MARK) for n in _names_in(path) if n.startswith(_MARK)]
    return {int(mark) for mark in marks if mark.isdigit()}


def _is_alive(pid: int) -> bool:
    return evidence.process_state(pid) not in ("", "Z", "X")


def _free_shared_memory(pids: Iterable[int]) -> None:
    """torch's files are named torch_PID_RANDOM_NUMBER."""
    mine = tuple(f"torch_{pid}_" for pid in pids)
    for name in _names_in(_SHARED_MEMORY) if mine else ():
        if name.startswith(mine):
            try:
                os.unlink(os.path.join(_SHARED_MEMORY, name))
            except OSError:
                pass
