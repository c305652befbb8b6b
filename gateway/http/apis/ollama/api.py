"""POST /api/chat and /api/generate as surfaces over chat completions and completions."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from outrider.gateway.answering.reading.misplaced_options import refuse_misplaced_options
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import yield_if_long
from outrider.gateway.http.apis.api import ANYONE, Caller, TranslatedRequest
from outrider.gateway.http.apis.ollama.answers import OllamaError
from outrider.gateway.http.apis.ollama.request import (
    chat_fields,
    idle_fields,
    prompt_fields,
    raw_fields,
)
from outrider.gateway.http.apis.ollama.schema import (
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
)
from outrider.gateway.http.apis.ollama.writer import OllamaWriter
from outrider.gateway.http.apis.reading import ReadBody, read_body

_NAMES: Final = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "structured_outputs": "format",
    "chat_template_kwargs": "think",
}
"""Fields with other names in this API."""

_NOTHING: Final = [{"role": "user", "content": ""}]
_encode: Final = msgspec.json.Encoder().encode
Request = TypeVar("Request", bound=OllamaFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaParts:
    """What both endpoints are made of."""

    meant_name: Callable[[str], Awaitable[str]]
    """The name that `model` accepts, of one that may end in :latest."""
    has_upstream_tiers: bool
    """Upstream tiers may read images; the local models do not."""
    ignores_unknown: bool = False
    """Unknown fields are left out."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    async def read(self, model: type[Request], body: bytes) -> ReadBody[Request]:
        """Return a request that names its model as the gateway does. Raises BadRequestError."""
        read = await read_body(model, body, ignores_unknown=self.ignores_unknown)
        if self.has_upstream_tiers:
            refuse_misplaced_options(read.document)
            await yield_if_long(body)
        name = await self.meant_name(read.request.model)
        request = read.request.model_copy(update={"model": name})
        ignored = (*read.ignored, *idle_fields(request))
        return ReadBody(request=request, document=read.document, ignored=ignored)

    def translated(
        self,
        read: ReadBody[Request],
        fields: dict[str, Any] | None,
        *,
        is_chat: bool,
        endpoint: Endpoint = "chat",
    ) -> TranslatedRequest:
        """Return the request and its writer. `fields` None: nothing is asked."""
        request = read.request
        writer = OllamaWriter(
            request.model,
            is_chat=is_chat,
            shows_thinking=request.think is not False,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )
        ready = None
        if fields is None:
            fields = {"model": request.model, "messages": _NOTHING}
            ready = writer.looked_up("unload" if request.keep_alive == 0 else "load")
        return TranslatedRequest(
            chat_body=_encode(fields),
            writer=writer,
            ignored=read.ignored,
            endpoint=endpoint,
            ready=ready,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChat:
    """/api/chat. Keeps nothing between requests."""

    parts: OllamaParts
    name: ClassVar[str] = "ollama_chat"

    async def read(self, body: bytes, _: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request into a chat completion and its writer. Raises BadRequestError."""
        read = await self.parts.read(OllamaChatRequest, body)
        fields = None
        if read.request.messages:
            takes_images = self.parts.has_upstream_tiers
            fields = chat_fields(read.request, read.document, takes_images=takes_images)
        return self.parts.translated(read, fields, is_chat=True)

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error."""
        return problem_body(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerate:
    """/api/generate. Keeps nothing between requests."""

    parts: OllamaParts
    name: ClassVar[str] = "ollama_generate"

    async def read(self, body: bytes, _: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request into a chat completion; one that is raw or has a suffix into a
        completion.

        Raises BadRequestError.
        """
        read = await self.parts.read(OllamaGenerateRequest, body)
        request = read.request
        if not request.prompt and not request.images and not request.suffix:
            return self.parts.translated(read, None, is_chat=False)
        if request.raw or request.suffix:
            fields = raw_fields(request)
            return self.parts.translated(read, fields, is_chat=False, endpoint="completion")
        fields = prompt_fields(request, takes_images=self.parts.has_upstream_tiers)
        return self.parts.translated(read, fields, is_chat=False)

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error."""
        return problem_body(problem)


def problem_body(problem: Problem) -> bytes:
    """Return an error in Ollama's words, in which fields have this API's names."""
    message, param = problem.message, problem.param
    if param in _NAMES and message.startswith(param):
        message = _NAMES[param] + message.removeprefix(param)
    return _encode(OllamaError(message))
