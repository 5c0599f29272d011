"""Events, effects and changes as short lines of a trace."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum

from resilient.core import changes as ch
from resilient.core.model import ErrorInfo, Holding, Plan, Slot, State, Worker, WorkerReport


def show(value: object) -> str:
    """The same text for equal values, in any process."""
    match value:
        case str():
            return value
        case float():
            return f"{value:.3f}"
        case Worker():
            return f"{value.node}/{value.number}"
        case Slot():
            return f"{value.node}:{value.local_rank}"
        case Enum():
            return str(value.value)
        case Holding():
            undo = "u" if value.source == "undo" else ""
            return f"{value.step}{undo}@{value.generation}"
        case Plan():
            ranks = " ".join(f"{show(m.worker)}:{m.slot.local_rank}" for m in value.members)
            cut = value.cut
            return (
                f"{value.generation}[{ranks}] {cut.kind.value} {cut.step} from "
                f"{','.join(map(str, cut.holders))}"
            )
        case ErrorInfo():
            return f"{value.type_name} {value.frame}"
        case WorkerReport():
            held = ",".join(show(holding) for holding in value.holdings)
            slot = value.slot.local_rank if value.slot else "-"
            where = f"{show(value.worker)}:{slot}"
            return f"{where} {value.status.value} g{value.generation} s{value.step} ({held})"
        case ch.Published():
            return f"Published {show(value.plan)}"
        case State():
            return "..."
        case tuple():
            return f"({', '.join(show(item) for item in value)})"
        case frozenset():
            return f"({', '.join(sorted(show(item) for item in value))})"
        case dict():
            return ", ".join(f"{key}: {show(item)}" for key, item in sorted(value.items()))
    if is_dataclass(value):
        shown = [
            f"{field.name}={show(item)}"
            for field in fields(value)
            if (item := getattr(value, field.name)) != field.default or field.default is MISSING
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    return str(value)
