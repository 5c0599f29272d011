"""Fire drills: what `--inject` may ask for, as data.

One text names one fault: ``kill:rank=2,step=40``. The launcher parses it to refuse a wrong one
before anything starts; the worker parses the same text and strikes itself
(`resilient.worker.drill`), since only it knows that it is at step 40, or between an optimizer's two
hooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from resilient.errors import ConfigError

KINDS = (
    "kill",
    "stop",
    "raise",
    "exit",
    "segv",
    "slow",
    "hang-in-python",
    "hang-holding-the-GIL",
)

POINTS = (
    "batch",  # asked for the batch of that step, nothing of it done yet
    "optimizer",  # inside optimizer.step(): the state counts as dirty
    "after-step",  # after optimizer.step(), before the commit
    "joining",  # about to make the generation's groups
    "building",  # in the train function, before protect()
    "restoring",  # in protect()
    "stopping",  # interrupted, about to report
    "waiting",  # has reported, waits for the next plan
)

_OUTSIDE = ("joining", "stopping", "waiting")  # no train function is there to raise out of
_KEYS = ("rank", "step", "generation", "at", "code", "seconds", "times")
MAX_DRILLS = 62
"""The page has one word of bits that says which have struck."""


@dataclass(frozen=True)
class Drill:
    """One fault to inject.

    Attributes:
        kind: one of KINDS.
        rank, step, generation: where it strikes; None: anywhere. step counts committed steps.
        at: one of POINTS.
        code: exit code of an `exit`.
        seconds: how long a hang lasts (None: for ever), or by how much `slow` is slow.
        times: how often it strikes before it is over; inf: at every occasion.
    """

    kind: str
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    at: str = "batch"
    code: int = 1
    seconds: float | None = None
    times: float = 1

    def matches(self, point: str, *, rank: int, step: int, generation: int) -> bool:
        """Whether this is its occasion, how often it has struck aside."""
        return (
            point == self.at
            and self.rank in (None, rank)
            and self.step in (None, step)
            and self.generation in (None, generation)
        )


def parse(spec: str) -> Drill:
    """The drill that a text like ``stop:rank=0,step=7,at=after-step`` describes.

    Raises:
        ConfigError: it describes none; says what is wrong and what is possible.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"--inject {spec!r}: unknown kind {kind!r}; kinds: {', '.join(KINDS)}")
    values: dict[str, str] = {}
    for pair in rest.split(",") if rest else ():
        key, equals, value = pair.partition("=")
        if key not in _KEYS or not equals:
            raise ConfigError(f"--inject {spec!r}: {pair!r} is not KEY=VALUE; keys: {_KEYS_TEXT}")
        if key in values:
            raise ConfigError(f"--inject {spec!r}: {key} is given twice")
        values[key] = value
    at = values.get("at", "batch")
    if at not in POINTS:
        raise ConfigError(f"--inject {spec!r}: unknown point at={at}; points: {', '.join(POINTS)}")
    if kind == "raise" and at in _OUTSIDE:
        raise ConfigError(f"--inject {spec!r}: at={at}, no train function runs that could raise")
    seconds = _number(spec, values, "seconds")
    times = _number(spec, values, "times")
    drill = Drill(
        kind=kind,
        rank=_whole(spec, values, "rank"),
        step=_whole(spec, values, "step"),
        generation=_whole(spec, values, "generation"),
        at=at,
        code=_whole(spec, values, "code") or 0 if "code" in values else 1,
        seconds=seconds,
        times=1 if times is None else times,
    )
    if drill.code > 255 or drill.times < 1 or (seconds is not None and math.isinf(seconds)):
        raise ConfigError(
            f"--inject {spec!r}: code is at most 255, times at least 1, seconds finite"
        )
    return drill


_KEYS_TEXT = ", ".join(_KEYS)


def _whole(spec: str, values: dict[str, str], key: str) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"--inject {spec!r}: {key}={text} is not a whole number from 0")
    return int(text)


def _number(spec: str, values: dict[str, str], key: str) -> float | None:
    text = values.get(key)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise ConfigError(f"--inject {spec!r}: {key}={text} is not a number from 0")
    return number
