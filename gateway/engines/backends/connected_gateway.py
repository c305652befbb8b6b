"""A gateway at an engine's socket: what it has in flight there, and how much it may have."""

import sys
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from outrider.engine.errors import EngineError, InvalidRequestError, QueueFullError
from outrider.engine.request import EngineRequest

_MAX_ID_CHARS: Final = 256
_OLDEST_ARRIVAL_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerBounds:
    """Bounds on what gateways make an engine hold."""

    max_gateways: int = 64
    max_requests: int = 1024
    """Requests of one gateway that are in flight."""
    max_calls: int = 64
    """Calls of one gateway that wait for an answer."""
    max_queued: int = 16_384
    """Messages for a gateway that reads slowly; 0: without a bound."""
    max_message_bytes: int = 32 << 20
    """-1: without a bound."""
    silent_after_s: float = 30.0
    """After so long without a message, a gateway's requests are aborted."""


UNBOUNDED: Final = ListenerBounds(
    max_gateways=sys.maxsize,
    max_requests=sys.maxsize,
    max_calls=sys.maxsize,
    max_queued=0,
    max_message_bytes=-1,
)
"""For an engine's own gateway and its workers, which are bounded by what the engine admits."""


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectedGateway:
    """A connection that has said hello."""

    number: int
    identity: bytes
    """The socket's name for it."""
    heard_s: float
    engine_ids: dict[str, str] = field(default_factory=dict)
    """The engine's ids of its requests, by its own ids."""
    num_calls: int = 0
    wants_blocks: bool = False
    """It is sent the news of the prefix cache."""
    wants_reset: bool = False
    """It is sent all that is kept first."""

    def refusal(self, request: EngineRequest, bounds: ListenerBounds) -> EngineError | None:
        """Return why a request is not even shown to the engine, or None."""
        own_id = request.request_id
        if max(len(own_id), len(request.group_id or "")) > _MAX_ID_CHARS:
            return InvalidRequestError(f"an id has more than {_MAX_ID_CHARS} characters")
        if own_id in self.engine_ids:
            return InvalidRequestError(f"request_id={own_id!r} is in use by a running request")
        if len(self.engine_ids) >= bounds.max_requests:
            return QueueFullError(num_waiting=bounds.max_requests, retry_after_s=1.0)
        return None

    def here(
        self, request: EngineRequest, engine_id: str, now_s: float, *, is_local: bool
    ) -> EngineRequest:
        """Return a request with the engine's ids, and its arrival by the engine's clock.

        `is_local`: the gateway has the same clock. Others send an age, negative.
        """
        arrival_s, group_id = request.arrival_s, request.group_id
        if arrival_s is not None:
            arrival_s = arrival_s if is_local else now_s + arrival_s
            arrival_s = min(max(arrival_s, now_s - _OLDEST_ARRIVAL_S), now_s)
        is_as_it_is = engine_id == request.request_id and arrival_s == request.arrival_s
        if is_as_it_is and group_id is None:  # most are, and a copy takes 15 µs
            return request
        return replace(
            request,
            request_id=engine_id,
            group_id=None if group_id is None else f"{self.number}/{group_id}",
            arrival_s=arrival_s,
        )


class RequestsInFlight:
    """The requests of all gateways, by the engine's ids: their own, where no two are the same."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[ConnectedGateway, str]] = {}
        self._num_renamed = 0

    def add(self, gateway: ConnectedGateway, own_id: str) -> str:
        """Return the id by which the engine is to know a request."""
        engine_id = own_id
        while engine_id in self._owners:
            self._num_renamed += 1
            engine_id = f"{self._num_renamed}/{own_id}"
        gateway.engine_ids[own_id] = engine_id
        self._owners[engine_id] = (gateway, own_id)
        return engine_id

    def owner(self, engine_id: str) -> tuple[ConnectedGateway, str] | None:
        """Return the gateway whose request it is, and its own id of it."""
        return self._owners.get(engine_id)

    def remove(self, engine_id: str) -> tuple[ConnectedGateway, str] | None:
        """Return the same of a request that is in flight no more."""
        if (owner := self._owners.pop(engine_id, None)) is not None:
            gateway, own_id = owner
            del gateway.engine_ids[own_id]
        return owner


def submitted_id(frame: bytes) -> str | None:
    """Return the request's id of a `Submit` whose other values cannot be read; None for others."""
    try:
        match msgspec.msgpack.decode(frame):
            case ["submit", {"request_id": str(found)}, *_]:
                return found
    except (ValueError, msgspec.DecodeError, RecursionError):
        pass
    return None
