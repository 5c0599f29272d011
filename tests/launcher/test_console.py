"""The progress line is for terminals only; lines of what happened are for everybody."""

from __future__ import annotations

import io
import os
import pty

from resilient_run.console import Console

STATUS = {"steps": {0: 41, 1: 42}, "world_size": 2, "phase": "running", "recoveries": 1}


def test_the_progress_line_is_drawn_on_a_terminal_and_removed() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(terminal)
        console.show(STATUS, 0.05)
        console.say("rank 1 is back")
        console.close()
    drawn = _read_to_the_end(ours)
    os.close(ours)
    assert "step 42" in drawn and "20.0 steps/s" in drawn and "recoveries: 1" in drawn
    assert "resilient-run: rank 1 is back\r\n" in drawn


def _read_to_the_end(terminal: int) -> str:
    """One read gives what has come through so far; after the last byte a pty gives EIO."""
    data = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:
            more = b""
        if not more:
            return data.decode()
        data += more


def test_nothing_is_drawn_elsewhere() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.show(STATUS, 0.05)
    console.close()
    assert stream.getvalue() == ""
