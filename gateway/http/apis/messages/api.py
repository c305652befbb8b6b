"""POST /v1/messages as a surface over chat completions."""

from typing import Final

import msgspec

from outrider.gateway.answering.reading.misplaced_options import refuse_misplaced_options
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.parsing import yield_if_long
from outrider.gateway.http.apis.api import ANYONE, Caller, TranslatedRequest
from outrider.gateway.http.apis.foreign import refuse_foreign
from outrider.gateway.http.apis.messages.answers import MessagesError
from outrider.gateway.http.apis.messages.problems import error_detail
from outrider.gateway.http.apis.messages.request import (
    chat_fields,
    chat_prompt_fields,
    shows_thinking,
)
from outrider.gateway.http.apis.messages.schema import (
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
)
from outrider.gateway.http.apis.messages.writer import MessageWriter
from outrider.gateway.http.apis.reading import read_body

_encode: Final = msgspec.json.Encoder().encode


class MessagesApi:
    """Anthropic's Messages API. Keeps nothing between requests.

    has_upstream_tiers: upstream tiers may read images and files; the local models do not.
    ignores_unknown: unknown fields are left out.
    """

    name: Final = "messages"

    def __init__(self, *, has_upstream_tiers: bool, ignores_unknown: bool = False) -> None:
        self._has_upstream_tiers = has_upstream_tiers
        self._ignores_unknown = ignores_unknown

    async def read(self, body: bytes, _: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request into a chat completion and its writer. Raises BadRequestError."""
        read = await read_body(MessagesRequest, body, ignores_unknown=self._ignores_unknown)
        if self._has_upstream_tiers:
            refuse_misplaced_options(read.document)
            await yield_if_long(body)
        foreign = self._left_out(read.request)
        fields = chat_fields(read.request, has_upstream_tiers=self._has_upstream_tiers)
        writer = MessageWriter(shows_thinking=shows_thinking(read.request))
        return TranslatedRequest(
            chat_body=_encode(fields),
            writer=writer,
            ignored=(*read.ignored, *read.request.unused_fields, *foreign),
            begins_with_usage=True,
        )

    async def read_prompt(self, body: bytes) -> bytes:
        """A request to count tokens as a chat completion's request. Raises BadRequestError."""
        read = await read_body(CountTokensRequest, body, ignores_unknown=self._ignores_unknown)
        self._left_out(read.request)
        return _encode(
            chat_prompt_fields(read.request, has_upstream_tiers=self._has_upstream_tiers)
        )

    def _left_out(self, request: PromptFields) -> tuple[str, ...]:
        """Return the paths of foreign parts. Raises BadRequestError if unknown fields are refused.

        Tools and blocks of other servers are such.
        """
        foreign = request.foreign
        if foreign and not self._ignores_unknown:
            refuse_foreign(foreign)
        return tuple(foreign)

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error."""
        return _encode(MessagesError(type="error", error=error_detail(problem)))
