"""Anthropic's Messages API, translated from OpenAI's requests and to OpenAI's answers.

https://platform.claude.com/docs/en/build-with-claude/streaming. Requests are written in
gateway/upstream/dialects/anthropic_request.py, streams are read in anthropic_stream.py.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.settings.server_traits import ServerTraits
from outrider.gateway.upstream.call import UpstreamCall, WholeAnswer
from outrider.gateway.upstream.dialects.anthropic_request import request_body, shows_thinking
from outrider.gateway.upstream.dialects.anthropic_stream import (
    AnthropicChunkReader,
    AnthropicUsage,
    StreamBlock,
    finish_reason_of,
    reported_error,
    usage_of,
)
from outrider.gateway.upstream.dialects.base import (
    ChunkReader,
    Resume,
    ServerRefusal,
    error_body,
    garbage,
    read_refusal,
)
from outrider.gateway.upstream.usage import usage_object

API_VERSION: Final = "2023-06-01"

_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    """A whole answer, or an error."""

    id: str | None = None
    type: str | None = None
    model: str | None = None
    content: list[StreamBlock] | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage | None = None
    error: msgspec.Raw = _NULL


_read_message: Final = msgspec.json.Decoder(_Message).decode


class AnthropicDialect:
    """The dialect of Anthropic's servers. `tier` is named in errors; `clock` gives Unix time."""

    def __init__(self, tier: str, clock: Callable[[], float] = time.time) -> None:
        self._tier = tier
        self._clock = clock

    def path(self, endpoint: Endpoint) -> str:
        """Return the path: there is only one for messages."""
        if endpoint != "chat":
            raise BadRequestError(
                f"The {self._tier} tier answers chats only; use /v1/chat/completions.",
                param="model",
            )
        return "/messages"

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers: the key in one of its own, and the version of the API."""
        headers = {"content-type": "application/json", "anthropic-version": API_VERSION}
        if api_key:
            headers["x-api-key"] = api_key
        return headers

    def body(self, call: UpstreamCall, traits: ServerTraits, resume: Resume | None = None) -> bytes:
        """Return the chat as messages. ValueError for `resume`: answers cannot be continued."""
        if resume is not None and resume.text:
            raise ValueError("the Messages API does not continue answers token by token")
        self.path(call.endpoint)
        return request_body(call)

    def chunk_reader(self, call: UpstreamCall) -> ChunkReader:
        """Return a reader that writes OpenAI's chunks."""
        return AnthropicChunkReader(
            self._tier, created=int(self._clock()), shows_thinking=shows_thinking(call)
        )

    def whole(self, call: UpstreamCall, body: bytes) -> WholeAnswer:
        """Return the message as a chat completion."""
        try:
            message = _read_message(body)
        except (ValueError, RecursionError):
            raise garbage(self._tier, "something that is not a message") from None
        if message.error != _NULL:
            raise reported_error(self._tier, message.error)
        if message.content is None:
            raise garbage(self._tier, "an answer without content")
        return self._translate(message, message.content, shows_thinking=shows_thinking(call))

    def _translate(
        self, message: _Message, blocks: list[StreamBlock], *, shows_thinking: bool
    ) -> WholeAnswer:
        text = "".join(block.text or "" for block in blocks if block.type == "text")
        thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
        calls = [block for block in blocks if block.type == "tool_use"]
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if thoughts:
            answer["reasoning_content"] = thoughts
        signed = [block.thought() for block in blocks if block.is_thought]
        if signed and shows_thinking:
            answer["thinking_blocks"] = signed
        if calls:
            answer["tool_calls"] = [block.call() for block in calls]
        usage = None if message.usage is None else usage_of(message.usage)
        finish_reason = finish_reason_of(message.stop_reason or "end_turn")
        choice: dict[str, Any] = {
            "index": 0,
            "message": answer,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if message.stop_sequence is not None:
            choice["stop_reason"] = message.stop_sequence  # vLLM's field
        document: dict[str, Any] = {
            "id": message.id or "",
            "object": "chat.completion",
            "created": int(self._clock()),
            "model": message.model or "",
            "choices": [choice],
        }
        if usage is not None:
            document["usage"] = usage_object(usage)
        return WholeAnswer(
            body=_encode(document),
            texts=(text,),
            reasoning=(thoughts,),
            num_other_bytes=sum(len(block.name or "") + len(bytes(block.input)) for block in calls),
            has_calls=bool(calls),
            finish_reason=finish_reason,
            usage=usage,
        )

    def refusal(self, status: int, body: bytes) -> ServerRefusal:
        """Return Anthropic's answer in OpenAI's form."""
        words = read_refusal(self._tier, status, body).message
        code = "context_length_exceeded" if "prompt is too long" in words else None
        return ServerRefusal(message=words, body=error_body(words, code=code))
