"""A chat completion as other APIs read it: what each event of its stream adds, or all at once.

Answers are this gateway's own or an upstream server's, so that the habits of other servers are read
too: reasoning under either of two names, content in parts, usage in a chunk with or without
choices, null wherever nothing is said. One answer is read: where a chunk has several choices, their
texts are joined.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.upstream.dialects.base import DONE, whole_number
from outrider.gateway.upstream.dialects.usage_fields import JsonNumber, UsageFields
from outrider.gateway.upstream.event_stream import EventSplitter, event_data

_NULL: Final = msgspec.Raw(b"null")


class ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. Cached ones are part of the prompt's, reasoning ones of the completion's."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def num_total_tokens(self) -> int:
        """Prompt and completion."""
        return self.num_prompt_tokens + self.num_completion_tokens


class CallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the tool call with this index; the first one has the id and the name."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ChatPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one event or of a whole answer; "", 0, () and None for absent parts."""

    comment: bytes = b""
    """The bytes of an event without data, sent as a keep-alive."""
    is_done: bool = False
    """It was [DONE]."""
    answer_id: str = ""
    created: int = 0
    model: str = ""
    reasoning: str = ""
    thoughts: Sequence[dict[str, Any]] = ()
    """Anthropic's thinking blocks, which are signed; their text is in `reasoning` as well."""
    content: str = ""
    refusal: str = ""
    calls: Sequence[CallPiece] = ()
    logprobs: Sequence[dict[str, Any]] | None = None
    """OpenAI's entries, one a token."""
    finish_reason: str | None = None
    stop: str | None = None
    """The stop string that ended the answer, if the server reports it."""
    usage: ChatUsage | None = None
    service_tier: str | None = None
    report: msgspec.Raw | None = None
    """The JSON of the `outrider` object."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """A delta, or a whole message."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None  # of a completion
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string, or a token's id


class _Answer(msgspec.Struct):
    """A chunk, or a whole completion."""

    id: str | int | None = None
    created: JsonNumber = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: UsageFields | None = None
    service_tier: str | None = None
    outrider: msgspec.Raw = _NULL


_read: Final = msgspec.json.Decoder(_Answer).decode
_DONE_PIECE: Final = ChatPiece(is_done=True)


class ChatChunkParser:
    """Reads a stream. Use once."""

    __slots__ = ("_splitter",)

    def __init__(self) -> None:
        self._splitter = EventSplitter()

    def read(self, part: bytes) -> list[ChatPiece]:
        """Parse the events in these bytes. Raises GenerationError for invalid chunks.

        This runs for each token of each client.
        """
        return [_piece_of(event) for event in self._splitter.push(part)]


def read_completion(body: bytes) -> ChatPiece:
    """Parse a whole completion. Raises GenerationError if it is not a valid one."""
    return _piece(_parse(body))


def _piece_of(event: bytes) -> ChatPiece:
    data = event_data(event)
    if not data:
        return ChatPiece(comment=event)
    return _DONE_PIECE if data == DONE else _piece(_parse(data))


def _parse(data: bytes) -> _Answer:
    try:
        return _read(data)
    except (ValueError, RecursionError):
        raise GenerationError(
            "The model's server sent an answer that cannot be read.", code="unreadable_answer"
        ) from None


def _piece(answer: _Answer) -> ChatPiece:
    choices = answer.choices or []
    if len(choices) == 1:
        choice = choices[0]
        message = choice.delta or choice.message or _Message(content=choice.text)
        return ChatPiece(
            **_common(answer),
            reasoning=message.reasoning_content or message.reasoning or _parts(message, "thinking"),
            thoughts=message.thinking_blocks or (),
            content=_content(message),
            refusal=message.refusal or "",
            calls=_calls(message),
            logprobs=None if choice.logprobs is None else choice.logprobs.content,
            finish_reason=choice.finish_reason or None,
            stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        )
    messages = [choice.delta or choice.message or _Message() for choice in choices]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    return ChatPiece(
        **_common(answer),
        content="".join(map(_content, messages)),
        reasoning="".join(m.reasoning_content or m.reasoning or "" for m in messages),
        calls=[call for message in messages for call in _calls(message)],
        finish_reason=reasons[0] if reasons else None,
    )


def _common(answer: _Answer) -> dict[str, Any]:
    """Return the fields that do not depend on the choices."""
    return {
        "answer_id": "" if answer.id is None else str(answer.id),
        "created": whole_number(answer.created),
        "model": answer.model or "",
        "usage": None if answer.usage is None else _usage(answer.usage),
        "service_tier": answer.service_tier,
        "report": None if answer.outrider == _NULL else answer.outrider,
    }


def _content(message: _Message) -> str:
    content = message.content
    return content if isinstance(content, str) else _parts(message, "text")


def _parts(message: _Message, kind: str) -> str:
    """The texts of the content's parts of that kind; a thinking part holds text parts."""
    return _joined(message.content, kind) if isinstance(message.content, list) else ""


def _joined(parts: list[Any], kind: str) -> str:
    texts = []
    for part in parts:
        value = part.get(kind) if isinstance(part, dict) and part.get("type") == kind else None
        if isinstance(value, list):
            value = _joined(value, "text")
        if isinstance(value, str):
            texts.append(value)
    return "".join(texts)


def _calls(message: _Message) -> Sequence[CallPiece]:
    """Return the parts of tool calls; those of whole answers are numbered by position."""
    if not message.tool_calls:
        return ()
    pieces = []
    for place, call in enumerate(message.tool_calls):
        function = call.function or _Function()
        pieces.append(
            CallPiece(
                index=place if call.index is None else call.index,
                call_id=call.id or "",
                name=function.name or "",
                arguments=function.arguments or "",
            )
        )
    return pieces


def _usage(usage: UsageFields) -> ChatUsage:
    return ChatUsage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_reasoning_tokens=usage.num_reasoning_tokens,
    )
