"""/v1/responses as a surface over chat."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.answering.reading.misplaced_options import refuse_misplaced_options
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.long_bodies import yield_if_long
from outrider.gateway.http.apis.api import TranslatedRequest
from outrider.gateway.http.apis.foreign import refuse_foreign
from outrider.gateway.http.apis.reading import read_body
from outrider.gateway.http.apis.responses.items import foreign_items
from outrider.gateway.http.apis.responses.paths import in_own_words
from outrider.gateway.http.apis.responses.request import InputTokensRequest, ResponsesRequest
from outrider.gateway.http.apis.responses.tools import OfferedTool, left_out, offered_tools
from outrider.gateway.http.apis.responses.translate import chat_document, repeated_fields
from outrider.gateway.http.apis.responses.writer import ResponseWriter

_encode: Final = msgspec.json.Encoder().encode


def _random_id() -> str:
    return secrets.token_hex(12)


class ResponsesApi:
    """One for all requests: it remembers nothing.

    has_upstream_tiers: requests may leave this machine, so misplaced options are refused.
    ignores_unknown: unknown fields are left out.
    """

    name: Final = "responses"

    def __init__(
        self,
        *,
        has_upstream_tiers: bool,
        ignores_unknown: bool = False,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = _random_id,
    ) -> None:
        """`clock`: seconds since 1970."""
        self._has_upstream_tiers = has_upstream_tiers
        self._ignores_unknown = ignores_unknown
        self._clock = clock
        self._new_id = new_id

    async def read(self, body: bytes) -> TranslatedRequest:
        """Translate a request. Raises BadRequestError, whose `param` is a field of this API."""
        read = await read_body(ResponsesRequest, body, ignores_unknown=self._ignores_unknown)
        request, document = read.request, read.document
        if self._has_upstream_tiers:
            refuse_misplaced_options(document)
            await yield_if_long(body)
        given = document.get("tools") or []
        foreign = left_out(given) | foreign_items(request.input)
        tools = self._offered(given, foreign)
        writer = ResponseWriter(
            repeated_fields(request, document),
            tools={tool.function["name"]: tool for tool in tools},
            clock=self._clock,
            new_id=self._new_id,
        )
        await yield_if_long(body)
        return TranslatedRequest(
            chat_body=_encode(chat_document(request, document, tools)),
            writer=writer,
            ignored=(*read.ignored, *request.unused_fields, *foreign),
        )

    async def read_prompt(self, body: bytes) -> bytes:
        """A request to count tokens as a chat completion's request. Raises BadRequestError."""
        read = await read_body(InputTokensRequest, body, ignores_unknown=self._ignores_unknown)
        request = read.request
        given = read.document.get("tools") or []
        tools = self._offered(given, left_out(given) | foreign_items(request.input or ""))
        return _encode(chat_document(request, read.document, tools))

    def _offered(
        self, given: Sequence[dict[str, Any]], foreign: Mapping[str, str]
    ) -> list[OfferedTool]:
        """Return the tools that a model may call.

        Raises BadRequestError where nothing may be left out, and something would be.
        """
        if foreign and not self._ignores_unknown:
            refuse_foreign(foreign)
        return offered_tools(given)

    def problem_body(self, problem: Problem) -> bytes:
        """OpenAI's error object, with the fields of this API."""
        return in_own_words(problem).body()
