"""/v1/responses as a surface over chat."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from outrider.gateway.answering.reading.misplaced_options import refuse_misplaced_options
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.parsing import yield_if_long
from outrider.gateway.http.apis.api import ANYONE, Caller, TranslatedRequest
from outrider.gateway.http.apis.foreign import refuse_foreign
from outrider.gateway.http.apis.reading import read_body
from outrider.gateway.http.apis.responses.conversation import Conversations, Earlier, StoredAnswer
from outrider.gateway.http.apis.responses.items import foreign_items, given_items
from outrider.gateway.http.apis.responses.paths import in_own_words
from outrider.gateway.http.apis.responses.request import (
    InputTokensRequest,
    ReferenceItem,
    ResponsesFields,
    ResponsesRequest,
)
from outrider.gateway.http.apis.responses.store import STORED_NOTHING, random_id
from outrider.gateway.http.apis.responses.tools import OfferedTool, left_out, offered_tools
from outrider.gateway.http.apis.responses.translate import chat_document, repeated_fields
from outrider.gateway.http.apis.responses.writer import ResponseWriter

_encode: Final = msgspec.json.Encoder().encode
Request = TypeVar("Request", ResponsesRequest, InputTokensRequest)


class ResponsesApi:
    """One for all requests.

    has_upstream_tiers: requests may leave this machine, so misplaced options are refused.
    ignores_unknown: unknown fields are left out. conversations: None where nothing is stored.
    """

    name: Final = "responses"

    def __init__(
        self,
        *,
        has_upstream_tiers: bool,
        ignores_unknown: bool = False,
        conversations: Conversations | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        """`clock`: seconds since 1970."""
        self._has_upstream_tiers = has_upstream_tiers
        self._ignores_unknown = ignores_unknown
        self._conversations = conversations
        self._clock = clock
        self._new_id = new_id

    async def read(self, body: bytes, caller: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request. Raises BadRequestError, whose `param` is a field of this API."""
        read = await read_body(ResponsesRequest, body, ignores_unknown=self._ignores_unknown)
        request, document = read.request, read.document
        if self._has_upstream_tiers:
            refuse_misplaced_options(document)
            await yield_if_long(body)
        given = document.get("tools") or []
        request, body = await self._with_references(request, body, caller)
        foreign = left_out(given) | foreign_items(given_items(request.input))
        tools = self._offered(given, foreign)
        earlier = await self._earlier(request, body, caller)
        storage = self._storage(request, earlier, caller)
        writer = ResponseWriter(
            repeated_fields(request, document),
            tools={tool.function["name"]: tool for tool in tools},
            clock=self._clock,
            new_id=self._new_id,
            storage=storage,
        )
        await yield_if_long(body)
        not_stored = ("store",) if request.store and storage is None else ()
        return TranslatedRequest(
            chat_body=_encode(chat_document(request, document, tools, earlier.items)),
            writer=writer,
            ignored=(*read.ignored, *not_stored, *request.unused_fields, *foreign),
            storage=storage,
        )

    async def _with_references(
        self, request: Request, body: bytes, caller: Caller
    ) -> tuple[Request, bytes]:
        """Return the request with the items that it names, and its body with them behind it.

        Raises GatewayError.
        """
        given = given_items(request.input)
        named = [at for at, item in enumerate(given) if isinstance(item, ReferenceItem)]
        if not named:
            return request, body
        if self._conversations is None:
            param = f"input.{named[0]}"
            raise BadRequestError(
                f"{param}: {STORED_NOTHING} Or send the item itself.", param=param
            )
        found = await self._conversations.referenced(request, given, body, caller)
        return request.model_copy(update={"input": list(found.items)}), body + found.written

    async def _earlier(self, request: ResponsesFields, body: bytes, caller: Caller) -> Earlier:
        """Return the stored conversation in front of the input. Raises GatewayError."""
        if self._conversations is not None:
            return await self._conversations.earlier(request, body, caller)
        if request.previous_response_id is None:
            return Earlier()
        raise BadRequestError(
            f"previous_response_id: {STORED_NOTHING} Or send the whole conversation as `input`.",
            param="previous_response_id",
        )

    def _storage(
        self, request: ResponsesRequest, earlier: Earlier, caller: Caller
    ) -> StoredAnswer | None:
        """Return what stores the response; None where it is not to be stored."""
        if self._conversations is None or request.store is False or request.is_private:
            return None
        items = given_items(request.input)
        return self._conversations.begin(request, items, earlier, caller)

    async def read_prompt(self, body: bytes, caller: Caller = ANYONE) -> bytes:
        """A request to count tokens as a chat completion's request. Raises BadRequestError."""
        read = await read_body(InputTokensRequest, body, ignores_unknown=self._ignores_unknown)
        request, body = await self._with_references(read.request, body, caller)
        given = read.document.get("tools") or []
        foreign = left_out(given) | foreign_items(given_items(request.input))
        tools = self._offered(given, foreign)
        earlier = await self._earlier(request, body, caller)
        return _encode(chat_document(request, read.document, tools, earlier.items))

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
