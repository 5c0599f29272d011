"""Events, effects and changes as short lines of a trace."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum

from resilient.core import changes as ch
from resilient.core.model import ErrorInfo, Holding, Plan, Slot, State, Worker, WorkerReport
from resilient.sim.faults import Settings


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
            holders = f" from {','.join(map(str, cut.holders))}" if cut.holders else ""
            return f"{value.generation}[{ranks}] {cut.kind.value} {cut.step}{holders}"
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


def settings_lines(chosen: Settings) -> list[str]:
    """What was drawn for the cluster and its job; it explains most of what follows in a trace."""
    config = chosen.config
    slots = chosen.slots[:1] if len(set(chosen.slots)) == 1 else chosen.slots
    on_disk = f"every {chosen.checkpoint_steps} steps" if config.persists else "none"
    return [
        f"nodes {len(chosen.slots)}, slots of each {','.join(map(str, slots))}, "
        f"with ranks {config.min_nodes} to {config.max_nodes} nodes, "
        f"ranks at least {config.min_world_size}, spares of each {config.num_spares}, "
        f"replace {'yes' if config.replace else 'no'}, checkpoints {on_disk}, "
        f"undo {'yes' if chosen.keeps_undo else 'no'}, "
        f"steps {chosen.length or 'until some after the heal'}, of {chosen.step_s:g} s",
        f"lease {chosen.ttl_s:g} s, renewed every {chosen.renew_s:g} s; timeouts in s: "
        f"interrupt {config.interrupt_timeout_s:g}, kill {config.kill_timeout_s:g}, "
        f"start {config.start_timeout_s:g}, rendezvous {config.rendezvous_timeout_s:g}, "
        f"last holder {config.last_holder_timeout_s:g}, quorum {config.quorum_timeout_s:g}, "
        f"orphans {config.orphan_timeout_s:g}, last call {config.last_call_s:g}, "
        f"growth {config.grow_delay_s:g}, hang {chosen.hang_timeout_s:g}, "
        f"collective {f'{chosen.group_timeout_s:g}' if chosen.group_timeout_s else 'never'}",
    ]
