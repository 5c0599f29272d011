"""What a person sees while the job runs and when it ends, on stderr.

A progress line on a terminal, plain lines for what happened otherwise; at the end the report, root
cause first. A healthy unmodified script adds nothing to its own output, as under torchrun.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

from resilient.core import events as ev
from resilient.core.model import CutKind, Outcome, Phase, State, Worker
from resilient.errors import ConfigError
from resilient.report.journal import read_journal
from resilient.report.summary import summarize
from resilient.report.text import summary_text

PROGRAM = "resilient-run"


def say(text: str) -> None:
    """One line on stderr, at once, whatever else is written there."""
    try:
        sys.stderr.write(f"{PROGRAM}: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


class Console:
    """Tells what happened, as it happens."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live: Any = None
        self._text: Any = None
        self._recovering_since_s: float | None = None

    # ------------------------------------------------------------ lines

    def tell(
        self, before: State, event: ev.Event, decision: ev.Decision, now_s: float, step: int
    ) -> None:
        """The decision, if a person wants to know of it. step: newest one any page shows."""
        after = decision.state
        was, phase = before.phase, after.phase
        if isinstance(event, ev.WorkerExited) and event.note and phase is not Phase.CLOSED:
            self.say(f"{_who(before, event.worker)}: {event.note.splitlines()[0]}")
        if phase is Phase.STOPPING and was is not Phase.STOPPING:
            self._recovering_since_s = now_s
            self.say(f"step {max(after.committed_step, step)}: {decision.reason}")
        since_s = self._recovering_since_s
        if isinstance(event, ev.WorkerStepped) and since_s is not None and not before.stepped:
            took_ms = 1000 * (now_s - since_s)
            self.say(f"step {event.step - 1} is committed, {took_ms:.0f} ms later")
            self._recovering_since_s = None
        for effect in decision.effects:
            self._tell_effect(effect, decision.reason)

    def _tell_effect(self, effect: ev.Effect, reason: str) -> None:
        if isinstance(effect, ev.PublishPlan) and effect.plan.generation > 0:
            plan = effect.plan
            source = {CutKind.INITIAL: "the beginning", CutKind.DISK: "disk"}.get(plan.cut.kind)
            ranks = ", ".join(map(str, plan.cut.holders))
            self.say(
                f"generation {plan.generation}: {plan.world_size} ranks go on from step "
                f"{plan.cut.step} (from {source or f'memory of rank {ranks}'})"
            )
        elif isinstance(effect, ev.PublishPlan) and effect.plan.cut.kind is CutKind.DISK:
            self.say(f"going on from step {effect.plan.cut.step}, from disk")
        elif isinstance(effect, ev.KillWorker) and effect.reason != "the job has ended":
            self.say(f"killing worker {effect.worker.number}: {effect.reason}")
        elif isinstance(effect, ev.ExcludeSlot):
            self.say(f"local rank {effect.slot.local_rank} is left out: {effect.reason}")
        elif isinstance(effect, (ev.Stop, ev.Persist)):
            self.say(reason)

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(f"{PROGRAM}: {text}", markup=False, highlight=False)
        else:
            say(text)

    # ------------------------------------------------------------ the progress line

    def show(self, status: dict[str, Any], usual_step_s: float | None) -> None:
        """Renews the progress line, on a terminal; call it a few times a second."""
        if not self._stream.isatty():
            return
        if self._live is None:
            # Late, and only here: it is slow to import.
            from rich.console import Console as RichConsole
            from rich.live import Live
            from rich.text import Text

            self._text = Text
            console = RichConsole(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        steps = status["steps"].values()
        parts = [f"step {max(steps, default=0)}", f"{status['world_size']} ranks", status["phase"]]
        if usual_step_s:
            parts.append(f"{1 / usual_step_s:.1f} steps/s")
        if status["recoveries"]:
            parts.append(f"recoveries: {status['recoveries']}")
        self._live.update(self._text(f"{PROGRAM}: {' · '.join(parts)}"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------ the end

    def report(self, journal_path: str, outcome: Outcome, decorated: bool) -> None:
        """The same as `resilient report` says of the run."""
        if outcome is Outcome.DONE and not decorated:
            return
        try:
            text = summary_text(summarize(read_journal(journal_path)))
        except ConfigError as error:
            text = str(error)
        say(f"{text}\n{PROGRAM}: journal: {journal_path}")


def _who(state: State, worker: Worker) -> str:
    rank = state.plan.rank_of(worker) if state.plan else None
    return f"worker {worker.number}" if rank is None else f"rank {rank}"
