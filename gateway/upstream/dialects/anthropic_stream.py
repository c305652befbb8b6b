"""Events of Anthropic's streams as chunks of OpenAI's."""

from typing import Any, Final

import msgspec

from outrider.gateway.upstream.call import Chunk
from outrider.gateway.upstream.dialects.anthropic_words import ERROR_STATUS, FINISH_REASONS
from outrider.gateway.upstream.dialects.base import (
    ReportedError,
    garbage,
    reported,
    to_event,
    whole_number,
)
from outrider.gateway.upstream.event_stream import event_data
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import usage_object

_encode: Final = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")
# A comment keeps the connection alive, and no client takes it for anything.
_NOTHING: Final = b":\n\n"

_Number = int | float | None


class _OutputDetails(msgspec.Struct):
    thinking_tokens: _Number = None


class AnthropicUsage(msgspec.Struct):
    """Tokens, as reported at the beginning and at the end."""

    input_tokens: _Number = None
    output_tokens: _Number = None
    cache_read_input_tokens: _Number = None
    cache_creation_input_tokens: _Number = None
    output_tokens_details: _OutputDetails | None = None

    def updated(self, later: "AnthropicUsage") -> "AnthropicUsage":
        """Return it with the figures of a later event, which cover all of the answer."""
        told = {name: value for name in self.__struct_fields__ if (value := getattr(later, name))}
        return msgspec.structs.replace(self, **told)


class StreamBlock(msgspec.Struct):
    """A piece of an answer: text, a thought, a call. In a stream, its beginning."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def is_thought(self) -> bool:
        """Return whether it has to be given back as it is."""
        return self.type in ("thinking", "redacted_thinking")

    def thought(self) -> dict[str, Any]:
        """Return the block in the form that Anthropic takes back."""
        if self.type == "redacted_thinking":
            return {"type": self.type, "data": self.data or ""}
        return {
            "type": self.type,
            "thinking": self.thinking or "",
            "signature": self.signature or "",
        }

    def call(self) -> dict[str, Any]:
        """Return a whole call in OpenAI's form."""
        return {
            "id": self.id or "",
            "type": "function",
            "function": {"name": self.name or "", "arguments": bytes(self.input).decode()},
        }


class _Delta(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    signature: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Start(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    usage: AnthropicUsage | None = None


class _Event(msgspec.Struct):
    type: str | None = None
    index: int | None = None
    delta: _Delta | None = None
    content_block: StreamBlock | None = None
    message: _Start | None = None
    usage: AnthropicUsage | None = None
    error: msgspec.Raw = _NULL


_read_event: Final = msgspec.json.Decoder(_Event).decode


class AnthropicChunkReader:
    """Writes a chunk for each event. Events without an OpenAI chunk become comments.

    The end of the message becomes the usage chunk, which the client gets if it asked for it; no
    chunk `is_done`. `shows_thinking`: signed thoughts are passed on as `thinking_blocks`.
    """

    def __init__(self, tier: str, *, created: int, shows_thinking: bool) -> None:
        self._tier = tier
        self._created = created
        self._tells_thoughts = shows_thinking
        self._head = self._begin(_Start())
        self._usage = AnthropicUsage()
        self._has_usage = False
        self._is_complete = False
        self._num_calls = 0
        self._has_arguments = False
        self._block = StreamBlock()  # the one that is being written

    @property
    def is_complete(self) -> bool:
        """Return whether it sent its stop reason or its end."""
        return self._is_complete

    def read(self, event: bytes) -> Chunk:
        """Read one event. This runs for each token of each client."""
        data = event_data(event)
        if not data:
            return Chunk(raw=_NOTHING)
        try:
            told = _read_event(data)
        except (ValueError, RecursionError):
            raise garbage(self._tier, "something that is not an event") from None
        match told.type:
            case "content_block_delta":
                return self._read_delta(told.delta or _Delta())
            case "content_block_start":
                return self._read_start(told.content_block or StreamBlock())
            case "content_block_stop":
                return self._read_stop()
            case "message_start":
                message = told.message or _Start()
                self._head = self._begin(message)
                self._take_usage(message.usage)
                return self._chunk({"role": "assistant", "content": ""})
            case "message_delta":
                self._take_usage(told.usage)
                return self._read_reason(told.delta or _Delta())
            case "message_stop":
                return self._read_end()
            case "error":
                raise reported_error(self._tier, told.error)
        return Chunk(raw=_NOTHING)  # pings, and future kinds of events

    def _read_delta(self, delta: _Delta) -> Chunk:
        match delta.type:
            case "text_delta" if delta.text:
                return self._chunk({"content": delta.text}, content=delta.text)
            case "thinking_delta" if delta.thinking:
                self._block.thinking = (self._block.thinking or "") + delta.thinking
                return self._chunk({"reasoning_content": delta.thinking}, reasoning=delta.thinking)
            case "input_json_delta" if delta.partial_json and self._block.type == "tool_use":
                self._has_arguments = True
                return self._arguments(delta.partial_json)
            case "signature_delta":
                self._block.signature = (self._block.signature or "") + (delta.signature or "")
        return Chunk(raw=_NOTHING)

    def _read_start(self, block: StreamBlock) -> Chunk:
        self._block = block
        self._has_arguments = False
        if block.type == "tool_use":
            self._num_calls += 1
            call = block.call()
            call["function"]["arguments"] = ""
            told = {"tool_calls": [{"index": self._num_calls - 1, **call}]}
            num_bytes = len(call["function"]["name"].encode())
            return self._chunk(told, num_other_bytes=num_bytes, has_calls=True)
        if block.type == "text" and block.text:
            return self._chunk({"content": block.text}, content=block.text)
        if block.type == "thinking" and block.thinking:
            return self._chunk({"reasoning_content": block.thinking}, reasoning=block.thinking)
        return Chunk(raw=_NOTHING)

    def _read_stop(self) -> Chunk:
        """Return the text that no delta carried."""
        block, self._block = self._block, StreamBlock()
        if block.type == "tool_use" and not self._has_arguments:
            return self._arguments(bytes(block.input).decode())
        if block.is_thought and self._tells_thoughts:
            return self._chunk({"thinking_blocks": [block.thought()]})
        return Chunk(raw=_NOTHING)

    def _read_reason(self, delta: _Delta) -> Chunk:
        if delta.stop_reason is None:
            return Chunk(raw=_NOTHING)
        self._is_complete = True
        return self._chunk(
            {}, finish_reason=finish_reason_of(delta.stop_reason), stop=delta.stop_sequence
        )

    def _read_end(self) -> Chunk:
        """Return the usage from the last event."""
        self._is_complete = True
        if not self._has_usage:
            return Chunk(raw=_NOTHING)
        usage = usage_of(self._usage)
        body = self._head + b'],"usage":' + _encode(usage_object(usage)) + b"}"
        return Chunk(raw=to_event(body), usage=usage, is_usage_only=True)

    def _arguments(self, text: str) -> Chunk:
        call = {"index": self._num_calls - 1, "function": {"arguments": text}}
        num_bytes = len(text.encode())
        return self._chunk({"tool_calls": [call]}, num_other_bytes=num_bytes, has_calls=True)

    def _take_usage(self, usage: AnthropicUsage | None) -> None:
        if usage is not None:
            self._has_usage = True
            self._usage = self._usage.updated(usage)

    def _begin(self, message: _Start) -> bytes:
        """Return the beginning of all chunks."""
        head = {
            "id": message.id or "",
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": message.model or "",
        }
        return _encode(head)[:-1] + b',"choices":['

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        content: str = "",
        reasoning: str = "",
        num_other_bytes: int = 0,
        has_calls: bool = False,
        finish_reason: str | None = None,
        stop: str | None = None,
    ) -> Chunk:
        reason = b"null" if finish_reason is None else _encode(finish_reason)
        if stop is not None:
            reason += b',"stop_reason":' + _encode(stop)  # vLLM's field
        body = (
            self._head
            + b'{"index":0,"delta":'
            + _encode(delta)
            + b',"logprobs":null,"finish_reason":'
            + reason
            + b"}]}"
        )
        return Chunk(
            raw=to_event(body),
            content=content,
            reasoning=reasoning,
            num_other_bytes=num_other_bytes,
            has_calls=has_calls,
            finish_reason=finish_reason,
            usage=usage_of(self._usage) if finish_reason and self._has_usage else None,
        )


def finish_reason_of(stop_reason: str) -> str:
    """Return OpenAI's finish reason; "stop" for an unknown one."""
    return FINISH_REASONS.get(stop_reason, "stop")


def usage_of(usage: AnthropicUsage) -> UpstreamUsage:
    """Return all tokens of the prompt, including those read from or written to the cache."""
    details = usage.output_tokens_details
    cached = whole_number(usage.cache_read_input_tokens)
    return UpstreamUsage(
        num_prompt_tokens=whole_number(usage.input_tokens)
        + cached
        + whole_number(usage.cache_creation_input_tokens),
        num_completion_tokens=whole_number(usage.output_tokens),
        num_cached_tokens=cached,
        num_reasoning_tokens=whole_number(details.thinking_tokens) if details else 0,
    )


def reported_error(tier: str, raw: msgspec.Raw) -> ReportedError:
    """Return the error that an event or a body reports; its type gives the status."""
    try:
        detail = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        detail = None
    kind = detail.get("type") if isinstance(detail, dict) else None
    status = ERROR_STATUS.get(kind) if isinstance(kind, str) else None
    return reported(tier, detail, status)
