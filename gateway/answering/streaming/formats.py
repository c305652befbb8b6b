"""The parts of chat and text completions that differ: a chunk's choice, and the whole answer."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypedDict

import msgspec

from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.line_ends import encode_text
from outrider.gateway.contract.schema.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    OutriderReport,
    ReportedServiceTier,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from outrider.verifier.token_logprobs import TokenLogprobs

_encode = msgspec.json.Encoder().encode


class WholeFields(TypedDict):
    """The fields of a whole answer that chat and completions share."""

    id: str
    created: int
    model: str
    usage: Usage
    outrider: OutriderReport
    service_tier: ReportedServiceTier | None


Completed = ChatCompletion | Completion


class Format(Protocol):
    """Writes one endpoint's choices; chat and completions share the rest."""

    chunk_object: str

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write the chunk's choice after its index, from the text to the log-probabilities."""

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the response without streaming."""


def _joined(deltas: Iterable[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


class ChatFormat:
    """Messages with log-probabilities token by token."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: ChatTokenizer, num_top: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write `"delta":{…},"logprobs":…`; the first one also says the role."""
        body = self._body(delta) if delta.text or is_first else b""
        role = b'"role":"assistant",' if is_first else b""
        if is_first and delta.kind == "call":
            role += b'"content":null,'
        logprobs = b"null"
        if delta.logprobs and self._num_top is not None:
            logprobs = _encode(self._logprobs([delta]))
        return b'"delta":{' + role + body + b'},"logprobs":' + logprobs

    def _body(self, delta: Delta) -> bytes:
        """Write the one field of a delta that has text; a call begins with its name."""
        text = encode_text(delta.text)
        match delta.kind:
            case "content":
                return b'"content":' + text
            case "reasoning":
                return b'"reasoning_content":' + text
            case "call":
                function = b'{"name":' + text + b',"arguments":""}'
                head = b'"id":' + _encode(delta.call_id) + b',"type":"function",'
            case "arguments":
                function = b'{"arguments":' + text + b"}"
                head = b""
        call = b'{"index":%d,' % delta.call_index + head + b'"function":' + function + b"}"
        return b'"tool_calls":[' + call + b"]"

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the messages."""
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return ChatCompletion(object="chat.completion", choices=choices, **fields)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        """Return the choice; with `reasoning_content` and `tool_calls` only if it has any."""
        calls = [_call(call, deltas) for call in deltas if call.kind == "call"]
        content, end = _joined(deltas, "content"), deltas[-1]
        assert end.finish_reason is not None, "the answer is over"
        return ChatChoice(
            index=index,
            message=ChatMessage(
                role="assistant",
                content=None if calls and not content else content,
                refusal=None,
                reasoning_content=_joined(deltas, "reasoning") or None,
                tool_calls=calls or None,
            ),
            logprobs=None if self._num_top is None else self._logprobs(deltas),
            finish_reason=end.finish_reason,
            stop_reason=end.stop,
        )

    def _logprobs(self, deltas: Iterable[Delta]) -> ChatLogprobs:
        content = [
            self._entry(entry, delta.tokenizer or self._tokenizer)
            for delta in deltas
            for entry in delta.logprobs
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _entry(self, entry: TokenLogprobs, tokenizer: ChatTokenizer) -> TokenLogprob:
        top = [TopLogprob(*_named(*pair, tokenizer)) for pair in islice(entry.top, self._num_top)]
        return TokenLogprob(*_named(entry.token_id, entry.logprob, tokenizer), top)


def _named(token_id: int, logprob: float, tokenizer: ChatTokenizer) -> tuple[str, float, list[int]]:
    """Return a token's text, log-probability and bytes."""
    token = tokenizer.token_bytes(token_id)
    return token.decode("utf-8", "replace"), finite(logprob), list(token)


def _call(call: Delta, deltas: Sequence[Delta]) -> ToolCall:
    arguments = "".join(
        delta.text
        for delta in deltas
        if delta.kind == "arguments" and delta.call_index == call.call_index
    )
    function = FunctionCall(name=call.text, arguments=arguments)
    return ToolCall(id=call.call_id, type="function", function=function)


class CompletionFormat:
    """Text with log-probabilities as parallel lists."""

    chunk_object = "text_completion"

    def __init__(self, tokenizer: ChatTokenizer, num_top: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write `"text":…,"logprobs":…`."""
        logprobs = b"null"
        if delta.logprobs and self._num_top is not None:
            logprobs = _encode(self._logprobs(delta.index, [delta]))
        return b'"text":' + encode_text(delta.text) + b',"logprobs":' + logprobs

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the continuations."""
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return Completion(object="text_completion", choices=choices, **fields)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        end = deltas[-1]
        assert end.finish_reason != "tool_calls", "a completion offers no tools"
        return CompletionChoice(
            index=index,
            text=_joined(deltas, "content"),
            logprobs=None if self._num_top is None else self._logprobs(index, deltas),
            finish_reason=end.finish_reason,
            stop_reason=end.stop,
        )

    def _logprobs(self, index: int, deltas: Iterable[Delta]) -> CompletionLogprobs:
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for delta in deltas:
            tokenizer = delta.tokenizer or self._tokenizer
            for entry in delta.logprobs:
                text = _text(entry.token_id, tokenizer)
                lists.tokens.append(text)
                lists.token_logprobs.append(finite(entry.logprob))
                top = islice(entry.top, self._num_top)
                tops = {_text(i, tokenizer): finite(value) for i, value in top}
                lists.top_logprobs.append(tops)
                lists.text_offset.append(self._offsets[index])
                self._offsets[index] += len(text)
        return lists


def _text(token_id: int, tokenizer: ChatTokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999 as OpenAI does."""
    return max(logprob, -9999.0)


def format_of(job: Job) -> Format:
    """Return how the endpoint of a job writes its answers."""
    kind = ChatFormat if job.endpoint == "chat" else CompletionFormat
    return kind(job.tokenizer, job.num_top_logprobs)
