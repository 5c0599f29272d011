"""A job that was, decided again: where does today's core decide otherwise than the one that ran it?

A journal has every event of a job, when it came, and what was decided. The core is a pure function,
so the same events give the same decisions, unless the core has changed meanwhile. What did not
change is known not to have, on a real job; and what did is shown where it matters first.

What is compared is the phase and the effects in order. Texts for people (reason, note) are not, and
a field that only one of the two releases knows is not either: a field that was added is no
decision. Such fields are counted, so that nobody takes them for equal. After a difference the
replay goes on from today's state, with events that answered the decisions of then: later
differences may only follow from the first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resilient.core import coordinator
from resilient.core.events import Effect, Event
from resilient.core.model import Config

TEXTS = frozenset({"reason", "note"})
"""Fields for people; a better wording is not another decision."""

MAX_TEXT = 60
MAX_ITEMS = 8
RAISED = "raised an error"
"""In place of the phase, where today's core does not get to a decision."""


@dataclass(frozen=True)
class Recorded:
    """One line of a journal.

    Attributes:
        line: its number in the file.
        now_s: when, on the clock of then.
        phase: after the decision, by its value.
        effects: as JSON values with a "type" each.
    """

    line: int
    now_s: float
    event: Event
    phase: str
    effects: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Difference:
    """A record that is decided otherwise today.

    Attributes:
        phase, effects: those of today.
        where: the first thing that differs, and its two values.
        reason: today's, for people.
    """

    recorded: Recorded
    phase: str
    effects: tuple[Mapping[str, Any], ...]
    where: str
    reason: str


@dataclass(frozen=True)
class Replayed:
    """What came of it.

    Attributes:
        differences: in the order of the records.
        of_one: fields of effects that only one side has, with how often; "PublishPlan.plan".
    """

    differences: tuple[Difference, ...]
    of_one: Counter[str]


def replay(
    config: Config,
    records: Iterable[Recorded],
    to_json: Callable[[Effect], Mapping[str, Any]],
) -> Replayed:
    """Feeds the events, at their times, to `coordinator.step`; returns what is decided otherwise.

    Args:
        to_json: an effect as the journal has it.
    Raises:
        ConfigError: config is not one that a job can have today.
    """
    state = coordinator.initial(config)
    differences: list[Difference] = []
    of_one: Counter[str] = Counter()
    for recorded in records:
        try:
            decision = coordinator.step(state, recorded.event, recorded.now_s)
        except Exception as error:  # a core that fails on a real job is what one wants to hear of
            where = f"phase: {recorded.phase} then, {type(error).__name__}: {error} today"
            differences.append(Difference(recorded, RAISED, (), where, ""))
            continue
        state = decision.state
        effects = tuple(to_json(effect) for effect in decision.effects)
        for then, today in zip(recorded.effects, effects, strict=False):
            of_one.update(fields_of_one(then, today))
        found = _first_difference(
            {"phase": recorded.phase, "effects": recorded.effects},
            {"phase": state.phase.value, "effects": effects},
        )
        if found is not None:
            differences.append(
                Difference(recorded, state.phase.value, effects, found, decision.reason)
            )
    return Replayed(tuple(differences), of_one)


def fields_of_one(then: Mapping[str, Any], today: Mapping[str, Any]) -> set[str]:
    """The fields of an event or effect that only one of its two forms has; "PublishPlan.plan".

    None where the types differ: then it is another one, and not the same with other fields.
    """
    if then.get("type") != today.get("type"):
        return set()
    return set(_of_one(then, today, str(today.get("type"))))


def _of_one(then: object, today: object, path: str) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(today, Mapping):
        yield from (f"{path}.{key}" for key in (then.keys() ^ today.keys()) - TEXTS)
        for key in then.keys() & today.keys():
            yield from _of_one(then[key], today[key], f"{path}.{key}")
    elif isinstance(then, list | tuple) and isinstance(today, list | tuple):
        for one, other in zip(then, today, strict=False):
            yield from _of_one(one, other, path)


def _first_difference(then: object, today: object, path: str = "") -> str | None:
    """Where two JSON values differ first, and how; None where they do not."""
    if isinstance(then, Mapping) and isinstance(today, Mapping):
        if then.get("type") != today.get("type"):
            return f"{path}.type: {then.get('type')} then, {today.get('type')} today"
        for key in then:
            if key in today and key not in TEXTS:
                found = _first_difference(then[key], today[key], f"{path}.{key}" if path else key)
                if found is not None:
                    return found
        return None
    if isinstance(then, list | tuple) and isinstance(today, list | tuple):
        for index, (one, other) in enumerate(zip(then, today, strict=False)):
            found = _first_difference(one, other, f"{path}[{index}]")
            if found is not None:
                return found
        if len(then) != len(today):
            return f"{path}: {len(then)} of them then, {len(today)} today"
        return None
    return None if then == today else f"{path}: {brief(then)} then, {brief(today)} today"


# ---------------------------------------------------------------- texts


def difference_text(difference: Difference, began_s: float) -> str:
    """Several lines: the event, both decisions, and where they part. began_s: of the job."""
    recorded = difference.recorded
    head = f"line {recorded.line}, at {recorded.now_s - began_s:.3f} s: {brief(recorded.event)}"
    lines = [head, f"  then:  {recorded.phase}", *_effect_lines(recorded.effects)]
    lines += [f"  today: {difference.phase}", *_effect_lines(difference.effects)]
    lines += [f"  differs in {difference.where}"]
    if difference.reason:
        lines += [f"  today's reason: {difference.reason}"]
    return "\n".join(lines)


def _effect_lines(effects: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"    > {brief(effect)}" for effect in effects] or ["    > nothing"]


def brief(value: object) -> str:
    """A value in one line, as short as it can still be understood; names before numbers.

    Values are those of events (frozen dataclasses) or of a journal (mappings with a "type").
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _named(type(value).__name__, fields)
    if isinstance(value, Mapping) and {"generation", "members", "cut"} <= value.keys():
        try:
            return _plan(value)
        except (KeyError, TypeError):
            pass  # a journal may say anything; then it is shown as it is
    if isinstance(value, Mapping):
        fields = {str(key): item for key, item in value.items() if key != "type"}
        return _named(str(value.get("type", "")), fields)
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
            return f"{value[0]}/{value[1]}"  # a worker, a slot or an address
        more = [f"... {len(value) - MAX_ITEMS} more"] * (len(value) > MAX_ITEMS)
        return f"[{', '.join([*map(brief, value[:MAX_ITEMS]), *more])}]"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        text = " ".join(value.split())
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return str(value)


def _named(name: str, fields: Mapping[str, object]) -> str:
    """Fields that say nothing (None, an empty text or list) are left out."""
    told = [
        f"{key}={brief(item)}" for key, item in fields.items() if item not in (None, "", (), [])
    ]
    return f"{name}({', '.join(told)})"


def _plan(plan: Mapping[str, Any]) -> str:
    """`1[0=a/0 1=a/3] memory 5 from [0]`: generation, who has which rank, and the cut."""
    members, cut = plan["members"], plan["cut"]
    ranks = [f"{member['rank']}={brief(member['worker'])}" for member in members[:MAX_ITEMS]]
    ranks += [f"... {len(members) - MAX_ITEMS} more"] * (len(members) > MAX_ITEMS)
    holders = f" from {brief(cut['holders'])}" if cut["holders"] else ""
    return f"{plan['generation']}[{' '.join(ranks)}] {cut['kind']} {cut['step']}{holders}"
