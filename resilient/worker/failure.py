"""What left the train function: described for the agent, judged, and cleared away.

Clearing is what makes re-entry cheap. The frames of an interrupted train function hold the old
generation's model wrappers, gradients and groups; emptied by hand, reference counts free them at
once, where a full garbage collection would cost more than the rest of the recovery.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator

import torch

from resilient.core.model import ErrorInfo

MAX_TEXT_CHARS = 16_000
"""A traceback can be long (RecursionError) and a message longer; the datagram has its limit."""
_MAX_NAME_CHARS = 500

_OWN_DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_DIRECTORY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FOREIGN_DIRECTORIES = tuple(
    {
        os.path.abspath(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    | {_OWN_DIRECTORY, _TORCH_DIRECTORY}
)
_COLLECTIVE_DIRECTORIES = (
    os.path.join(_TORCH_DIRECTORY, "distributed") + os.sep,
    os.path.join(_OWN_DIRECTORY, "worker", "exchange.py"),
    os.path.join(_OWN_DIRECTORY, "worker", "groups.py"),
    os.path.join(_OWN_DIRECTORY, "state", "transfer.py"),
)


def describe(error: BaseException) -> ErrorInfo:
    """The error for comparing (class and the user's innermost frame) and for people."""
    kind = type(error)
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if _is_users(frame.filename)]
    frame = (user or frames)[-1] if frames else None
    where = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame is not None else ""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # a __str__ of the user's that raises must not hide what happened
        text = f"{kind.__module__}.{kind.__qualname__}\n"
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]}\n  [... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    # a lone surrogate has no UTF-8 and would make the message unsendable
    return ErrorInfo(
        f"{kind.__module__}.{kind.__qualname__}"[:_MAX_NAME_CHARS],
        _sendable(where[-_MAX_NAME_CHARS:]),
        _sendable(text),
    )


def strip_own_frames(error: BaseException) -> None:
    """Removes our outermost frames, so that the traceback begins with the user's function."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OWN_DIRECTORY):
        tb = tb.tb_next
    if tb is not None:
        error.__traceback__ = tb


def is_in_collective(error: BaseException, links_lost: bool) -> bool:
    """Whether a collective failed under the train function, rather than the user's own code.

    Args:
        links_lost: fewer connections to peers are up than there were. Decides where frames cannot:
            a failed work.wait(), or an error that the autograd engine carries out of C++.
    """
    if isinstance(error, torch.distributed.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return links_lost or (bool(frames) and frames[-1].filename.startswith(_COLLECTIVE_DIRECTORIES))


def clear(error: BaseException) -> None:
    """Empties the frames of the error and of all that it came from."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
    # `sys.last_*` is only set by an interactive interpreter; there it would keep everything.
    for name in ("last_exc", "last_value", "last_traceback"):
        if getattr(sys, name, None) is not None:
            setattr(sys, name, None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        pending += getattr(one, "exceptions", ())  # an ExceptionGroup's


def _is_users(filename: str) -> bool:
    path = os.path.abspath(filename)
    return not filename.startswith("<frozen") and not path.startswith(_FOREIGN_DIRECTORIES)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
