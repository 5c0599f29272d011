"""The journal: one JSON line for every (now, event, decision), safe against a kill at any byte.

Each line is one write to a file opened for appending, so that lines never mix and at most the last
one is torn; readers skip that. The first line says what was asked for. There is no fsync: the
journal must outlive the agent, not the machine's power, and a disk must never be waited for on the
way from a fault to the next step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from resilient import wire
from resilient.core.events import Decision, Event
from resilient.core.model import Config
from resilient.report.journal import FILE_NAME, VERSION

_encode = msgspec.json.encode


class Journal:
    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, FILE_NAME)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)

    def begin(self, config: Config, argv: Sequence[str], now_s: float, unix_s: float) -> None:
        self._write(
            {
                "version": VERSION,
                "config": msgspec.to_builtins(config),
                "start_unix_s": unix_s,
                "now": now_s,
                "argv": list(argv),
            }
        )

    def add(self, now_s: float, event: Event, decision: Decision) -> None:
        self._write(
            {
                "now": now_s,
                "event": wire.event_to_json(event),
                "phase": decision.state.phase.value,
                "effects": [wire.effect_to_json(effect) for effect in decision.effects],
                "reason": decision.reason,
            }
        )

    def _write(self, line: dict[str, object]) -> None:
        try:
            os.write(self._fd, _encode(line) + b"\n")
        except OSError:
            pass  # a full disk must not take the training along

    def close(self) -> None:
        os.close(self._fd)
