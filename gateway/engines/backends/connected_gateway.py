"""A gateway at an engine's socket: what it has in flight there, and how much it may have."""

from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from outrider.engine.errors import EngineError, InvalidRequestError, QueueFullError
from outrider.engine.request import EngineRequest

MAX_CALLS: Final = 64
"""Of one gateway that wait for an answer."""

_MAX_ID_CHARS: Final = 256
_OLDEST_ARRIVAL_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerBounds:
    """How much gateways can make an engine hold.

    max_requests: in flight for one gateway. silent_after_s: without a message for so long, a
    gateway's requests are aborted.
    """

    max_gateways: int = 64
    max_requests: int = 1024
    max_message_bytes: int = 32 << 20
    silent_after_s: float = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectedGateway:
    """A connection that has said hello.

    `identity`: the socket's name for it. The engine sees `number` in front of its ids.
    wants_blocks: it is told the news of the prefix cache; wants_reset: all that is kept, first.
    """

    number: int
    identity: bytes
    heard_s: float
    request_ids: set[str] = field(default_factory=set)
    num_calls: int = 0
    wants_blocks: bool = False
    wants_reset: bool = False

    def engine_id(self, own_id: str) -> str:
        """Return an id of this gateway as the engine knows it."""
        return f"{self.number}/{own_id}"

    def refusal(self, request: EngineRequest, bounds: ListenerBounds) -> EngineError | None:
        """Return why a request is not even shown to the engine, or None."""
        own_id = request.request_id
        if max(len(own_id), len(request.group_id or "")) > _MAX_ID_CHARS:
            return InvalidRequestError(f"an id has more than {_MAX_ID_CHARS} characters")
        if self.engine_id(own_id) in self.request_ids:
            return InvalidRequestError(f"request_id={own_id!r} is in use by a running request")
        if len(self.request_ids) >= bounds.max_requests:
            return QueueFullError(num_waiting=bounds.max_requests, retry_after_s=1.0)
        return None

    def here(self, request: EngineRequest, now_s: float) -> EngineRequest:
        """Return a request with the engine's ids, and its arrival by the engine's clock."""
        arrival_s, group_id = request.arrival_s, request.group_id
        if arrival_s is not None:  # its age, negative: clocks of two machines cannot be compared
            arrival_s = now_s + min(max(arrival_s, -_OLDEST_ARRIVAL_S), 0.0)
        return replace(
            request,
            request_id=self.engine_id(request.request_id),
            group_id=None if group_id is None else self.engine_id(group_id),
            arrival_s=arrival_s,
        )


def own_id(engine_id: str) -> str:
    """Return the gateway's part of an id."""
    return engine_id.partition("/")[2]


def number_of(engine_id: str) -> str:
    """Return the number of the connection that an id belongs to."""
    return engine_id.partition("/")[0]


def submitted_id(frame: bytes) -> str | None:
    """Return the request's id of a `Submit` whose other values cannot be read; None for others."""
    try:
        match msgspec.msgpack.decode(frame):
            case ["submit", {"request_id": str(found)}, *_]:
                return found
    except (ValueError, msgspec.DecodeError, RecursionError):
        pass
    return None
