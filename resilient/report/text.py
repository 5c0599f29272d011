"""The numbers of a job in words: short, the cause before what followed from it.

Plain lines without colours, the same for a terminal, a log file and `resilient report`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from resilient.core.model import ErrorInfo, Fault, FaultKind, Outcome
from resilient.report.summary import Recovery, Summary

MAX_DETAIL_LINES = 40

_ENDS = {
    Outcome.DONE: "done",
    Outcome.DRAINED: "stopped as asked",
    Outcome.TRAIN_FUNCTION_FAILED: "FAILED: the train function failed",
    Outcome.MISCONFIGURED: "FAILED: the script must be changed",
    Outcome.UNRECOVERABLE: "FAILED: not recoverable",
    Outcome.SCRIPT_FAILED: "FAILED: the script failed",
    Outcome.SIGNALLED: "ended by a signal",
}


def summary_text(summary: Summary) -> str:
    """The report, as several lines without a newline at the end."""
    lines = [_head(summary)]
    if summary.root_cause is not None:
        where = _where(summary.root_cause.step, scripted=summary.training_s is None)
        lines += [f"  cause: {fault_text(summary.root_cause)}{where}"]
        lines += _details(summary.root_cause)
        if summary.collateral:
            lines += [f"  followed from it: {_folded(summary.collateral)}"]
    for number, recovery in enumerate(summary.recoveries, start=1):
        lines += _recovery_lines(number, recovery)
    lines += _tail(summary)
    return "\n".join(lines)


def fault_text(fault: Fault) -> str:
    """One fault: who, and what happened, in one line."""
    who = "a process without a rank" if fault.rank is None else f"rank {fault.rank}"
    if fault.kind is FaultKind.DIED:
        error = f": {_error_text(fault.error)}" if fault.error is not None else ""
        return f"{who} {_status_text(fault.status)}{error}"
    if fault.kind is FaultKind.RAISED:
        return f"{who} raised {_error_text(fault.error)}"
    if fault.kind is FaultKind.COLLECTIVE:
        return f"a collective of {who} failed: {_error_text(fault.error)}"
    if fault.kind is FaultKind.HUNG:
        # The note goes from the particular to what all the others did; the head is enough here.
        note = fault.note.strip().partition("\n")[0].partition("; ")[0]
        return f"{who} hung" + (f" ({note.removeprefix(f'{who} is ')})" if note else "")
    return f"the node of {who} was lost"


def _head(summary: Summary) -> str:
    if summary.outcome is None:
        state = f"running ({summary.phase})" if summary.phase != "closed" else "closing"
    else:
        state = _ENDS.get(summary.outcome, f"FAILED: {summary.outcome.value}")
    if summary.drained_by is not None:
        state += f" ({_signal_name(summary.drained_by)})"
    parts = []
    if summary.training_s is not None:
        steps = f"{summary.num_steps} {_plural('step', summary.num_steps)}"
        parts.append(f"{steps} in {summary.training_s:.1f} s")
        parts.append(f"start-up {summary.startup_s or 0.0:.1f} s")
    if summary.world_size:
        parts.append(f"{summary.world_size} {_plural('rank', summary.world_size)}")
    if summary.num_generations > 1:
        parts.append(f"{summary.num_generations} generations")
    line = f"{state}: {', '.join(parts) or 'nothing has begun'}"
    if summary.outcome not in (None, Outcome.DONE) and summary.reason:
        line += f"\n  {summary.reason}"
    return line


def _recovery_lines(number: int, recovery: Recovery) -> list[str]:
    first, *others = recovery.causes
    word = "restart" if recovery.restart else "recovery"
    total = "not ended" if recovery.total_s is None else f"{recovery.total_s * 1000:.0f} ms"
    where = _where(recovery.step, scripted=recovery.restart)
    lines = [f"{word} {number}: {fault_text(first)}{where}: {total}"]
    lines += [f"  then, on the way: {fault_text(fault)}" for fault in others]
    if not recovery.restart:
        phases = [
            f"{name} {'unknown' if span_s is None else f'{span_s * 1000:.0f}'}"
            for name, span_s in recovery.phases.items()
        ]
        lines.append(f"  phases in ms: {', '.join(phases)}")
    notes = []
    if recovery.resume_step is not None and recovery.num_redone:
        notes.append(f"{recovery.num_redone} steps made again from step {recovery.resume_step}")
    if recovery.shrunk:
        notes.append(f"went on with {recovery.world_size} ranks")
    if recovery.collateral:
        notes.append(f"followed from it: {_folded(recovery.collateral)}")
    if notes:
        lines.append(f"  {'; '.join(notes)}")
    return lines


def _where(step: int, *, scripted: bool) -> str:
    """The steps of a script that is not decorated are its own affair."""
    return "" if scripted else f", at step {step}"


def _tail(summary: Summary) -> list[str]:
    lines = []
    if summary.persisted_step is not None:
        lines.append(f"newest step on disk: {summary.persisted_step}")
    if summary.num_excluded:
        lines.append(f"slots excluded: {summary.num_excluded}")
    if summary.num_spare_deaths:
        lines.append(f"spares that died: {summary.num_spare_deaths}")
    if summary.journal.num_unreadable:
        lines.append(f"lines of the journal that do not read: {summary.journal.num_unreadable}")
    ratio = summary.effective_ratio
    if ratio is not None:
        lines.append(f"time lost {summary.lost_s:.2f} s; effective training time ratio {ratio:.3f}")
    return lines


def _details(fault: Fault) -> list[str]:
    """The evidence: a traceback, else what was noted (its last lines, a stack)."""
    text = fault.error.text if fault.error is not None and fault.error.text else fault.note
    lines = text.rstrip().splitlines()
    if len(lines) > MAX_DETAIL_LINES:
        left_out = len(lines) - MAX_DETAIL_LINES
        lines = [f"({left_out} lines before this)", *lines[-MAX_DETAIL_LINES:]]
    return [f"    {line}" for line in lines]


def _folded(faults: Sequence[Fault]) -> str:
    """Collateral errors, one phrase a kind: "ranks 0, 1, 3: RuntimeError"."""
    kinds: dict[str, set[str]] = {}
    erred = {fault.worker for fault in faults if fault.error is not None}
    for fault in faults:
        if fault.kind is FaultKind.HUNG and fault.worker in erred:
            continue  # it stood still because of what it then raised
        if fault.error is not None:
            what = _type_name(fault.error)
        elif fault.kind is FaultKind.HUNG:
            what = "stood still"
        elif fault.kind is FaultKind.NODE_LOST:
            what = "node lost"
        else:
            what = _status_text(fault.status)
        kinds.setdefault(what, set()).add("?" if fault.rank is None else str(fault.rank))
    phrases = []
    for what, ranks in kinds.items():
        names = ", ".join(sorted(ranks, key=lambda rank: (len(rank), rank)))
        phrases.append(f"{_plural('rank', len(ranks))} {names}: {what}")
    return "; ".join(phrases)


def _status_text(status: int | None) -> str:
    if status is None:
        return "died"
    if status < 0:
        return f"died ({_signal_name(-status)})"
    if status == 0:
        return "exited with 0 before the end"
    return f"exited with {status}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _error_text(error: ErrorInfo | None) -> str:
    if error is None:
        return "an error"
    return _type_name(error) + (f" at {error.frame}" if error.frame else "")


def _type_name(error: ErrorInfo) -> str:
    return error.type_name.removeprefix("builtins.")


def _plural(word: str, number: int) -> str:
    return word if number == 1 else f"{word}s"
