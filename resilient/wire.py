"""Messages to bytes and back: typed, validated, never pickled. No sockets here.

Two uses: the datagrams between an agent and its workers (MessagePack, one message a datagram), and
the journal (one JSON line an event). msgspec checks every field on the way in; what does not fit
raises `WireError`.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from resilient.core import events
from resilient.core.model import Cut, ErrorInfo, Holding
from resilient.errors import ResilientError

MAX_MESSAGE_BYTES = 160_000
"""A SEQPACKET socket refuses 220 kB; texts are cut so that messages stay well below."""


class WireError(ResilientError):
    """Bytes that are no message of ours."""


class UnknownEvent(WireError):
    """A journal's event of a type that this release does not have."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base of the datagrams; the class name is the tag."""


# ---------------------------------------------------------------- worker -> agent


class Ready(Message, frozen=True):
    """At the decorator, never entered. persisted_step: newest complete checkpoint on disk."""

    persisted_step: int | None = None


class Joined(Message, frozen=True):
    generation: int


class Restored(Message, frozen=True):
    generation: int


class Stepped(Message, frozen=True):
    """First committed step of the generation; step: committed steps now."""

    generation: int
    step: int


class Interrupted(Message, frozen=True):
    generation: int
    step: int
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


class Failed(Message, frozen=True):
    generation: int
    step: int
    error: ErrorInfo
    in_collective: bool
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


class Finished(Message, frozen=True):
    generation: int
    step: int
    holdings: tuple[Holding, ...]
    persisted_step: int | None = None


class Persisted(Message, frozen=True):
    """Answer to Persist and Look; step None: nothing is complete on disk, or see note."""

    step: int | None
    note: str = ""


class DrainRequest(Message, frozen=True):
    """The worker itself was sent SIGTERM or SIGINT (Slurm signals every process)."""

    signum: int


# ---------------------------------------------------------------- agent -> worker


class Start(Message, frozen=True):
    """Enter this generation. Where the rank had another process, that one's page is attached as a
    file descriptor: the rank's own RNG state is in it.

    Attributes:
        environment: what os.environ is to say before the entry (RANK, MASTER_ADDR, ...).
        cut: where it resumes and which ranks hold that.
        first_world_size: of the first plan; parts keep the size that it gave them. 0: this one's.
        drills: `--inject` faults that are still to happen.
    """

    generation: int
    rank: int
    local_rank: int
    world_size: int
    store_host: str
    store_port: int
    cut: Cut
    environment: dict[str, str]
    first_world_size: int = 0
    drills: tuple[str, ...] = ()


class Abort(Message, frozen=True):
    """Sever everything of this generation (and of older ones) and leave it."""

    generation: int
    reason: str


class Persist(Message, frozen=True):
    step: int


class Look(Message, frozen=True):
    """Say Persisted with the newest step that is complete on disk."""


class Close(Message, frozen=True):
    """Every rank has finished: return from main()."""


class Stop(Message, frozen=True):
    """The job has ended otherwise: raise the own error again, or exit with this code."""

    exit_code: int
    reason: str


FromWorker = Union[
    Ready, Joined, Restored, Stepped, Interrupted, Failed, Finished, Persisted, DrainRequest
]
FromAgent = Union[Start, Abort, Persist, Look, Close, Stop]

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_agent = msgspec.msgpack.Decoder(FromAgent)


def encode(message: Message) -> bytes:
    """The message as one datagram.

    Raises:
        WireError: it is larger than MAX_MESSAGE_BYTES.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(data)} bytes is too large to send")
    return data


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises WireError on anything that is not such a message."""
    try:
        return _from_worker.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"not a message from a worker: {error}") from None


def decode_from_agent(data: bytes) -> FromAgent:
    """Raises WireError on anything that is not such a message."""
    try:
        return _from_agent.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"not a message from an agent: {error}") from None


# ---------------------------------------------------------------- journal

_EVENTS: dict[str, Any] = {cls.__name__: cls for cls in events.Event.__args__}


def event_to_json(event: events.Event) -> dict[str, Any]:
    """Plain JSON values; `event_from_json` gives the event back."""
    value = {"type": type(event).__name__, **msgspec.to_builtins(event)}
    if isinstance(event, events.Alike):
        value["event"] = event_to_json(event.event)
    return value


def event_from_json(value: dict[str, Any]) -> events.Event:
    """Fields that are not known are passed over.

    Raises:
        UnknownEvent: its type is not known.
        WireError: its type is known, and its content does not fit.
    """
    fields = dict(value)
    cls = _EVENTS.get(fields.pop("type", ""))
    if cls is None:
        raise UnknownEvent(f"unknown event {value.get('type')!r}")
    try:
        if cls is events.Alike:
            return _alike_from_json(fields)
        event: events.Event = msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise WireError(f"bad {cls.__name__}: {error}") from None
    return event


def _alike_from_json(value: dict[str, Any]) -> events.Alike:
    event = event_from_json(value.get("event", {}))
    if not isinstance(event, events.MemberEvent):
        raise WireError(f"not an event of members: {type(event).__name__}")
    return events.Alike(event, msgspec.convert(value.get("ranks"), tuple[tuple[int, int], ...]))


def effect_to_json(effect: events.Effect) -> dict[str, Any]:
    """For people and tools that read the journal; a replay decides again and compares."""
    return {"type": type(effect).__name__, **msgspec.to_builtins(effect)}
