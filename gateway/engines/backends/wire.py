"""Messages between a gateway and an engine, and their msgpack encoding.

Commands go to the engine, replies come back. The in-process client passes the same objects through
a queue without encoding them, so both clients drive the same step loop.

msgspec tells members of a union apart by a tag that only its structs can carry; the contracts are
plain dataclasses (the engine must not need msgspec). So each event travels in a one-field struct.
"""

import base64
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.errors import EngineError, as_utf8
from outrider.engine.events import (
    AdapterInfo,
    AnswerHeld,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.telemetry.logs import LogFormat
from outrider.verifier.params import Tier

PROTOCOL_VERSION: Final = 3
"""Of the messages between a gateway and an engine's process."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages: positional, so that field names do not travel with every token."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an engine process: the first line of its standard input (JSON)."""

    builder: str
    """`module:name` of a function that takes `arguments` and a progress callback."""
    arguments: str
    endpoint: str
    """The address that it listens on."""
    key_file: str | None = None
    """The file of the line's keys, where it is no private file."""
    scratch_dir: str
    """Removed by a process whose gateway has died."""
    log_level: str = "INFO"
    log_format: LogFormat = "text"


# Commands: gateway → engine.


class Submit(_Message, frozen=True, tag="submit"):
    """Queue a request."""

    request: EngineRequest


class SwitchTier(_Message, frozen=True, tag="switch_tier"):
    """Switch a running request to another tier."""

    request_id: str
    tier: Tier
    keeps_answer: bool = False


class KeepOnTier(_Message, frozen=True, tag="keep_on_tier"):
    """Hold an answer no longer at its end."""

    request_id: str


class Abort(_Message, frozen=True, tag="abort"):
    """End a request early."""

    request_id: str


class Unpin(_Message, frozen=True, tag="unpin"):
    """Have a tenant's prompt of this name kept no longer. Unknown names are ignored."""

    tenant: str
    name: str


class GetStats(_Message, frozen=True, tag="get_stats"):
    """Ask for a snapshot; the reply carries the same `call_id`."""

    call_id: int


class PrepareAdapter(_Message, frozen=True, tag="prepare_adapter"):
    """Have an adapter read and checked; the reply carries the same `call_id`."""

    call_id: int
    ref: AdapterRef


class GetBlocks(_Message, frozen=True, tag="get_blocks"):
    """Ask for `BlocksReset` now, and for `BlocksChanged` from then on."""


class PullBlocks(_Message, frozen=True, tag="pull_blocks"):
    """Ask for blocks, as another engine does; the reply carries the same `call_id`."""

    call_id: int
    wanted: BlocksWanted


class Ping(_Message, frozen=True, tag="ping"):
    """Ask for a sign of life; answered between two steps."""


class Stop(_Message, frozen=True, tag="stop"):
    """Leave: a gateway its engine, or an engine its step loop."""


class Hello(_Message, frozen=True, tag="hello"):
    """The first message on a connection to an engine's process (see `Welcome`).

    Every version of the protocol can read its first field.
    """

    protocol: int


Command = (
    Submit
    | SwitchTier
    | KeepOnTier
    | Abort
    | Unpin
    | GetStats
    | PrepareAdapter
    | GetBlocks
    | PullBlocks
    | Ping
    | Stop
    | Hello
)


# Reports: an engine's process → the gateway that started it, on standard output.


class Loading(_Message, frozen=True, tag="loading"):
    """Progress of start-up. `fraction` is in [0, 1]."""

    stage: str
    fraction: float


class Ready(_Message, frozen=True, tag="ready"):
    """The models are loaded, and `endpoint` takes gateways."""

    endpoint: str


class WireError(_Message, frozen=True):
    """An exception: class name, message and the attributes that its class gave it."""

    name: str
    message: str
    attributes: dict[str, Any]


class LoadFailed(_Message, frozen=True, tag="load_failed"):
    """The engine could not be built; its process ends."""

    error: WireError


Report = Loading | Ready | LoadFailed


# Replies: engine → gateway.


class Welcome(_Message, frozen=True, tag="welcome"):
    """The answer to `Hello`, once the models are loaded."""

    generation: str
    """Random for each process. It tells a process that was started anew from one that could not be
    reached for a while."""
    info: EngineInfo
    tokenizers: dict[Tier, str]
    """The fingerprint of each tier's."""


class EngineDraining(_Message, frozen=True, tag="draining"):
    """The engine takes no new requests and ends when the running ones have."""


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The engine ends this connection and aborts its requests."""

    reason: str
    is_final: bool = False
    """Another connection would end the same way."""


class Crashed(_Message, frozen=True, tag="crashed"):
    """A step raised; the engine's state is lost."""

    error: WireError


class Refused(_Message, frozen=True, tag="refused"):
    """`Engine.submit` raised for this request."""

    request_id: str
    error: WireError


class StatsReply(_Message, frozen=True, tag="stats"):
    """The answer to `GetStats`."""

    call_id: int
    stats: EngineStats


class AdapterReply(_Message, frozen=True, tag="adapter"):
    """The answer to `PrepareAdapter`: the adapter, or why it cannot be used."""

    call_id: int
    info: AdapterInfo | None
    error: WireError | None


class PulledBlocks(_Message, frozen=True, tag="pulled_blocks"):
    """The answer to `PullBlocks`: extents (`pack_extent`), none where the blocks did not come to be
    there in time; or why there are none for the asker."""

    call_id: int
    extents: list[bytes]
    error: WireError | None = None


class Pong(_Message, frozen=True, tag="pong"):
    """The answer to `Ping`."""


class BlocksChanged(_Message, frozen=True, tag="blocks"):
    """The prefixes that requests can go on from, and those that are gone (`outrider.engine.cache`).

    At most one a step. Hashes stand as `join_hashes` writes them.
    """

    generation: int
    """One more than that of the message before. Where a number is missing, `GetBlocks` asks for the
    whole."""
    kept: bytes
    dropped: bytes
    stored: bytes = b""
    """Codes of blocks that came to lie on the engine's disk, `HASH_BYTES` each (`StoredNews`)."""
    unstored: bytes = b""


class BlocksReset(_Message, frozen=True, tag="blocks_reset"):
    """All prefixes that are kept, as of a generation; the next change has the next number."""

    generation: int
    kept: bytes
    stored: bytes = b""
    """Codes of all blocks on the engine's disk."""
    names_key: bytes = b""
    """Makes codes of hashes (`outrider.engine.cache.sealing`); empty without a disk."""


class _PrefillDone(_Message, frozen=True, tag="prefill"):
    event: PrefillDone


class _TokensEmitted(_Message, frozen=True, tag="tokens"):
    event: TokensEmitted


class _AnswerHeld(_Message, frozen=True, tag="held"):
    event: AnswerHeld


class _TierSwitched(_Message, frozen=True, tag="switched"):
    event: TierSwitched


class _Finished(_Message, frozen=True, tag="finished"):
    event: Finished


class _Failed(_Message, frozen=True, tag="failed"):
    event: Failed


AnyEvent = _PrefillDone | _TokensEmitted | _AnswerHeld | _TierSwitched | _Finished | _Failed
_ENVELOPES: dict[type, type[Any]] = {
    PrefillDone: _PrefillDone,
    TokensEmitted: _TokensEmitted,
    AnswerHeld: _AnswerHeld,
    TierSwitched: _TierSwitched,
    Finished: _Finished,
    Failed: _Failed,
}


def with_id(envelope: AnyEvent, request_id: str) -> AnyEvent:
    """Return an event with this id of its request."""
    event: EngineEvent = envelope.event
    if event.request_id == request_id:
        return envelope
    renamed: AnyEvent = _ENVELOPES[type(event)](replace(event, request_id=request_id))
    return renamed


class Events(_Message, frozen=True, tag="events"):
    """All events of one step, in the engine's order."""

    envelopes: list[AnyEvent]

    @classmethod
    def pack(cls, events: Iterable[EngineEvent]) -> "Events":
        """Wrap the events of one step."""
        return cls([_ENVELOPES[type(event)](event) for event in events])

    def unpack(self) -> list[EngineEvent]:
        """The events as the engine made them."""
        return [envelope.event for envelope in self.envelopes]


Reply = (
    Crashed
    | Refused
    | StatsReply
    | AdapterReply
    | PulledBlocks
    | Pong
    | BlocksChanged
    | BlocksReset
    | Events
    | Welcome
    | EngineDraining
    | Goodbye
)

HASH_BYTES: Final = 8
"""Of a block's hash, on the wire."""

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Reply) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """A command from its bytes. Raises msgspec.ValidationError on anything else."""
    return _command_decoder.decode(frame)


def decode_reply(frame: bytes) -> Reply:
    """A reply from its bytes. Raises msgspec.ValidationError on anything else."""
    return _reply_decoder.decode(frame)


def encode_report(report: Report) -> bytes:
    """Encode a report as a line: in base 64, since JSON has no infinity."""
    return base64.b64encode(msgspec.msgpack.encode(report)) + b"\n"


def decode_report(line: bytes) -> Report:
    """A report from its line. Raises binascii.Error or msgspec.DecodeError on anything else."""
    return _report_decoder.decode(base64.b64decode(line))


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Return the first 8 bytes of each hash, joined: enough to tell millions of blocks apart."""
    return b"".join(block_hash[:HASH_BYTES] for block_hash in hashes)


def pack_error(error: BaseException) -> WireError:
    """An exception in a form that survives the trip.

    Errors that are not the engine's own keep their type's name in the message, because the other
    side can only rebuild `EngineError` and its subclasses.
    """
    if isinstance(error, EngineError):
        return WireError(type(error).__name__, as_utf8(str(error)), dict(vars(error)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return WireError(EngineError.__name__, as_utf8(text), {})


def unpack_error(wire_error: WireError) -> EngineError:
    """The exception again: same class, same message, same attributes."""
    error_class = _error_classes().get(wire_error.name, EngineError)
    # Past the class's own __init__, which takes other arguments than the finished message.
    error = error_class.__new__(error_class)
    error.args = (wire_error.message,)
    vars(error).update(wire_error.attributes)
    return error


def _error_classes() -> dict[str, type[EngineError]]:
    """Every engine error by name, subclasses of subclasses included."""
    found: dict[str, type[EngineError]] = {}
    pending: list[type[EngineError]] = [EngineError]
    while pending:
        error_class = pending.pop()
        found[error_class.__name__] = error_class
        pending.extend(error_class.__subclasses__())
    return found
