"""The seam for other APIs: their request becomes a chat completion's, its answer theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal

Reserve = Callable[[int], None]
"""Counts so many bytes in all as a request's. Raises KeyBodiesFullError or BodiesFullError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a request, and the room for what is read beside its body."""

    principal: Principal
    reserve: Reserve


ANYONE: Final = Caller(principal=ANONYMOUS, reserve=lambda _: None)
"""Whoever it is where nothing is stored."""
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


class AnswerWriter(Protocol):
    """Writes one chat answer in another API's words. Use once."""

    @property
    def media_type(self) -> str:
        """The media type of a stream."""

    def part(self, part: bytes) -> bytes:
        """Whole events of a chat completion's stream, as this API's events; may be empty.

        The usage chunk and [DONE] come as well; comments are passed on as they are.
        """

    def whole(self, body: bytes) -> bytes:
        """The JSON of a chat completion, as this API's JSON."""

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """The events that end a stream which broke off; `delivered` is the report's last word."""


class AnswerStorage(Protocol):
    """Stores one answer that its client may ask for again."""

    def forbid(self) -> None:
        """Store nothing: the request is private. Call it before the answer begins."""

    async def store(self, sent: bytes) -> bytes:
        """Store the answer, which is whole, before its last bytes are sent; return these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedRequest:
    """A translated request. `chat_body` is JSON of a chat completion's request.

    `ignored`: the paths of what was left out of the request.
    """

    chat_body: bytes
    writer: AnswerWriter
    ignored: tuple[str, ...] = ()
    begins_with_usage: bool = False
    """The writer wants the prompt's tokens in the first chunk of a stream."""
    endpoint: Endpoint = "chat"
    """Whose request `chat_body` is."""
    ready: bytes | None = None
    """The answer to a request that only asks whether its model is there; else None."""
    storage: AnswerStorage | None = None
    """None where the answer is not stored."""


class Api(Protocol):
    """Another API. `name` is its endpoint's in the ledger."""

    @property
    def name(self) -> str:
        """Such as "responses"."""

    async def read(self, body: bytes, caller: Caller, /) -> TranslatedRequest:
        """Translate a request. Raises BadRequestError, whose `param` is a field of this API."""

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error before the first byte, in this API's words."""
