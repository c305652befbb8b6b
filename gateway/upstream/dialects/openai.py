"""OpenAI's chat and completions, as OpenAI and the servers that are compatible speak them.

Answers are passed on byte by byte but for tool calls that clients could not put together; only the
necessary fields are read. Supported are also
the habits of vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp and others: data without a space, comments
and empty data as a sign of life, usage in the last chunk that has choices or in one whose choices
are null, reasoning under either of two names, content in parts, errors as a word or an object.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.settings.server_traits import ServerTraits
from outrider.gateway.upstream.call import (
    Chunk,
    TokenLogprob,
    UpstreamCall,
    WholeAnswer,
    num_answers,
)
from outrider.gateway.upstream.dialects.base import (
    DONE,
    ChunkReader,
    Resume,
    ServerRefusal,
    garbage,
    read_refusal,
    reported,
)
from outrider.gateway.upstream.dialects.logprob_fields import (
    LogprobReader,
    read_logprobs,
    without_logprobs,
)
from outrider.gateway.upstream.dialects.openai_request import request_body
from outrider.gateway.upstream.dialects.tool_calls import ToolCallParts, in_order_whole
from outrider.gateway.upstream.dialects.usage_fields import UsageFields
from outrider.gateway.upstream.event_stream import event_data
from outrider.gateway.upstream.tally import size_bytes
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

_NULL: Final = msgspec.Raw(b"null")
_SIGN_OF_LIFE: Final = b":\n\n"
# An event may be marked as an error by its name alone.
_ERROR_NAME: Final = re.compile(rb"event: ?error\r?[\n\r]")
# The finish reasons of vLLM and SGLang for an answer that they gave up.
_FAILED: Final = frozenset({"error", "abort"})


class _Text(msgspec.Struct):
    """A delta, or a whole message."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: msgspec.Raw = _NULL
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    """A choice of a chunk or of a whole answer, chat or completion."""

    index: int | None = None
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = _NULL


class _Answer(msgspec.Struct):
    """A chunk or a whole answer, or an error."""

    choices: list[_Choice] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = _NULL
    object: str | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


_read_call: Final = msgspec.json.Decoder(_Call).decode
_read_answer: Final = msgspec.json.Decoder(_Answer).decode


class OpenAIDialect:
    """The dialect of every server but Anthropic's. `tier` is named in errors."""

    def __init__(self, tier: str) -> None:
        self._tier = tier

    def path(self, endpoint: Endpoint) -> str:
        """Return the endpoint's path: servers have both."""
        return "/chat/completions" if endpoint == "chat" else "/completions"

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return a bearer token where there is a key."""
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        return headers

    def body(self, call: UpstreamCall, traits: ServerTraits, resume: Resume | None = None) -> bytes:
        """Return the client's request with the server's name of the model, asking for usage."""
        return request_body(call, traits, resume)

    def chunk_reader(self, call: UpstreamCall) -> ChunkReader:
        """Return a reader that passes on the events as they are."""
        reader = OpenAIChunkReader(self._tier, num_choices=num_answers(call))
        return LogprobReader(reader, call) if call.wants_logprobs else reader

    def whole(self, call: UpstreamCall, body: bytes) -> WholeAnswer:
        """Read the server's own body."""
        answer = _parse(self._tier, body)
        if not answer.choices:
            raise garbage(self._tier, "an answer without choices")
        choices = sorted(answer.choices, key=lambda choice: choice.index or 0)
        if any(choice.finish_reason in _FAILED for choice in choices):
            raise reported(self._tier, "the answer was given up")
        messages = [choice.message or _Text() for choice in choices]
        if any(message.tool_calls for message in messages):
            body = in_order_whole(body, [_calls_of(choice.message) for choice in answer.choices])
        token_logprobs: tuple[TokenLogprob, ...] = ()
        if call.wants_logprobs:
            token_logprobs = read_logprobs(choices[0].logprobs)
            body = body if call.shows_logprobs else without_logprobs(body)
        return WholeAnswer(
            body=body,
            texts=tuple(
                content_of(message) or choice.text or ""
                for choice, message in zip(choices, messages, strict=True)
            ),
            reasoning=tuple(map(reasoning_of, messages)),
            num_other_bytes=sum(map(num_other_bytes, messages)),
            has_calls=any(map(has_calls, messages)),
            token_logprobs=token_logprobs,
            finish_reason=choices[0].finish_reason,
            usage=_usage_of(answer.usage),
        )

    def refusal(self, status: int, body: bytes) -> ServerRefusal:
        """Return the server's own fields in OpenAI's form."""
        return read_refusal(self._tier, status, body)


class OpenAIChunkReader:
    """Reads what is needed of each event; `raw` is the event itself but for its tool calls."""

    def __init__(self, tier: str, *, num_choices: int) -> None:
        self._tier = tier
        self._num_choices = num_choices
        self._finished: set[int] = set()
        self._calls = ToolCallParts()
        self._is_done = False

    @property
    def is_complete(self) -> bool:
        """Return whether [DONE] came, or every choice has a finish reason."""
        return self._is_done or len(self._finished) >= self._num_choices

    def read(self, event: bytes) -> Chunk:
        """Read one event. This runs for each token of each client."""
        data = event_data(event)
        if not data:
            return self._read_other(event)
        if data == DONE:
            self._is_done = True
            return Chunk(raw=event, is_done=True)
        answer = _parse(self._tier, data)
        usage = None if answer.usage is None else _usage_of(answer.usage)
        if not answer.choices:
            if usage is None and _ERROR_NAME.match(event):
                raise reported(self._tier, _decoded(data))
            return Chunk(raw=event, usage=usage, is_usage_only=usage is not None)
        calls_tools = False
        for choice in answer.choices:
            if choice.finish_reason:  # some servers send "" until the end
                self._finish(choice)
            if choice.delta and choice.delta.tool_calls:
                calls_tools = True
        if calls_tools:
            parts = [(choice.index or 0, _calls_of(choice.delta)) for choice in answer.choices]
            event = self._calls.in_order(event, parts)
        if len(answer.choices) > 1:
            return self._read_several(event, answer.choices, usage)
        choice = answer.choices[0]
        delta = choice.delta
        return Chunk(
            raw=event,
            index=choice.index or 0,
            content=(choice.text or "") if delta is None else content_of(delta),
            reasoning="" if delta is None else reasoning_of(delta),
            num_other_bytes=0 if delta is None else num_other_bytes(delta),
            has_calls=delta is not None and has_calls(delta),
            has_logprobs=choice.logprobs != _NULL,
            finish_reason=choice.finish_reason or None,
            usage=usage,
        )

    def _finish(self, choice: _Choice) -> None:
        """Record the end of a choice, if it has one."""
        if choice.finish_reason in _FAILED:
            raise reported(self._tier, "the answer was given up")
        self._finished.add(choice.index or 0)

    def _read_several(
        self, event: bytes, choices: Sequence[_Choice], usage: UpstreamUsage | None
    ) -> Chunk:
        """Read several choices in one event: all text counts as one if one answer was requested."""
        read = choices if self._num_choices == 1 else choices[:1]
        deltas = [choice.delta or _Text(content=choice.text) for choice in read]
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        others = [choice.delta or _Text(content=choice.text) for choice in choices[len(read) :]]
        return Chunk(
            raw=event,
            index=choices[0].index or 0,
            content="".join(map(content_of, deltas)),
            reasoning="".join(map(reasoning_of, deltas)),
            num_other_bytes=sum(map(num_other_bytes, deltas)) + sum(map(_num_bytes, others)),
            has_calls=any(has_calls(choice.delta) for choice in choices if choice.delta),
            has_logprobs=any(choice.logprobs != _NULL for choice in choices),
            finish_reason=reasons[0] if reasons else None,
            usage=usage,
        )

    def _read_other(self, event: bytes) -> Chunk:
        """Read an event without data: a keep-alive, or an error from llama.cpp until 2025.

        Clients take what is no comment for a chunk and fail on its empty data.
        """
        lines = event.splitlines()
        for line in lines:
            if line.startswith(b"error:"):
                raise reported(self._tier, _decoded(line[6:]) or line[6:].decode(errors="replace"))
        is_comment = all(line.startswith(b":") for line in lines if line)
        return Chunk(raw=event if is_comment else _SIGN_OF_LIFE)


def content_of(text: _Text) -> str:
    """Return the answer's text; of content in parts (Mistral) the text parts."""
    content = text.content
    if isinstance(content, str):
        return content
    return _joined(content, "text") if content else ""


def reasoning_of(text: _Text) -> str:
    """Return the reasoning, from either of its two fields."""
    if text.reasoning_content or text.reasoning:
        return text.reasoning_content or text.reasoning or ""
    return _joined(text.content, "thinking") if isinstance(text.content, list) else ""


def _calls_of(text: _Text | None) -> list[msgspec.Raw]:
    return (text and text.tool_calls) or []


def has_calls(text: _Text) -> bool:
    """Return whether a tool is called, or a function in the older form."""
    return bool(text.tool_calls) or text.function_call != _NULL


def num_other_bytes(text: _Text) -> int:
    """Return the bytes beside content and reasoning: names and arguments of calls, refusals."""
    if not text.tool_calls and text.function_call == _NULL and text.refusal == _NULL:
        return 0
    num_bytes = sum(map(_num_call_bytes, text.tool_calls or ()))
    if text.function_call != _NULL:
        num_bytes += _num_call_bytes(msgspec.Raw(b'{"function":%b}' % text.function_call))
    if text.refusal != _NULL:
        num_bytes += len(bytes(text.refusal))
    return num_bytes


def _num_call_bytes(raw: msgspec.Raw) -> int:
    """Return the bytes of a call's name and arguments; all of one in another form."""
    try:
        function = _read_call(raw).function
    except (ValueError, RecursionError):
        function = None
    if function is None:
        return len(bytes(raw))
    return size_bytes(function.name or "") + size_bytes(function.arguments or "")


def _num_bytes(text: _Text) -> int:
    return size_bytes(content_of(text)) + size_bytes(reasoning_of(text)) + num_other_bytes(text)


def _joined(parts: list[Any], kind: str) -> str:
    """Join the texts of the parts of that kind; a thinking part holds text parts."""
    found = []
    for part in parts:
        value = part.get(kind) if isinstance(part, dict) and part.get("type") == kind else None
        if isinstance(value, list):
            value = _joined(value, "text")
        if isinstance(value, str):
            found.append(value)
    return "".join(found)


def _parse(tier: str, data: bytes) -> _Answer:
    """Raise UpstreamError: garbage, or the error that it reports."""
    try:
        answer = _read_answer(data)
    except (ValueError, RecursionError):
        answer = None
    if answer is None:
        raise _unreadable(tier, data)
    if answer.error != _NULL and (detail := _decoded(answer.error)):
        raise reported(tier, detail)
    if answer.object == "error":
        raise reported(tier, _decoded(data))
    return answer


def _unreadable(tier: str, data: bytes) -> UpstreamError:
    """Return the error for data that is no answer; the data may still report one."""
    document = _decoded(data)
    if isinstance(document, dict) and document.get("error"):
        return reported(tier, document["error"])
    if document is None:
        return garbage(tier, "something that is not JSON")
    return garbage(tier, "JSON that is not an answer")


def _decoded(data: bytes) -> Any:
    """Decode JSON; None for invalid JSON."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None


def _usage_of(usage: UsageFields | None) -> UpstreamUsage | None:
    """Return the reported usage, with impossible numbers as 0; None where there is none."""
    if usage is None or (usage.prompt_tokens is None and usage.completion_tokens is None):
        return None
    return UpstreamUsage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_reasoning_tokens=usage.num_reasoning_tokens,
    )
