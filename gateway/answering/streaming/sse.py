"""Deltas to the bytes of OpenAI's responses: stream events and whole bodies.

A stream repeats the same 150 bytes in every event, so they are built once; what changes goes
through msgspec. This runs for each token of each client.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, TypedDict

import msgspec

from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.streaming.choice import Delta
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.streaming.trace import DeltaTrace
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.contract.schema.line_ends import escape_line_ends
from outrider.gateway.contract.schema.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FunctionCall,
    OutriderReport,
    PromptTokensDetails,
    ReportedServiceTier,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from outrider.verifier.token_logprobs import TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"
_EVENT_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
_encode = msgspec.json.Encoder().encode


def encode_text(text: str) -> bytes:
    """Encode a JSON string that no line reader can cut."""
    encoded: bytes = _encode(text)
    return encoded if text.isascii() else escape_line_ends(encoded)


def is_end(part: bytes) -> bool:
    """Return whether a part that ends like [DONE] ends with it: a comment may look like it."""
    before = part[: -len(DONE)]
    return not before or before.endswith(_EVENT_ENDS)


def event(body: bytes) -> bytes:
    """Frame one server-sent event."""
    return b"data: " + body + b"\n\n"


def rounded(number: float | None) -> float | None:
    """Round to six digits."""
    return None if number is None else round(number, 6)


def report(generation: Generation, origin: RouteReason) -> OutriderReport:
    """Return the `outrider` object."""
    job, used = generation.job, generation.usage
    mean = round(used.num_tokens / used.num_steps, 4) if used.num_steps else 0.0
    is_degraded = generation.is_degraded
    return OutriderReport(
        tier=generation.tier,
        reason=origin.explain(generation.reason),
        route_tier=origin.route_tier or job.tier,
        escalated=generation.is_escalated,
        quality=rounded(job.quality),
        confidence=rounded(generation.confidence),
        held_tokens=generation.num_held_tokens,
        reused_tokens=used.num_reused_tokens,
        discarded_tokens=generation.num_discarded_tokens,
        drafted_tokens=used.num_drafted_tokens,
        accepted_tokens=used.num_accepted_tokens,
        unratified_tokens=used.num_unratified_tokens,
        mean_emitted_tokens=mean,
        ttft_s=rounded(generation.ttft_s()),
        queue_s=rounded(used.queue_s),
        seed=job.seed,
        hand_off=origin.hand_off or ("failure" if is_degraded else None),
        degraded=origin.is_degraded or is_degraded,
        arm=job.arm or None,
    )


def usage(generation: Generation) -> Usage:
    """Return the `usage` object. A prompt counts once, also as a cached one."""
    used = generation.usage
    num_prompt = generation.job.num_prompt_tokens
    num_rejected = sum([choice.usage.num_mispredicted_tokens for choice in generation.choices])
    num_cached = min(used.num_cached_tokens, num_prompt)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=used.num_tokens,
        total_tokens=num_prompt + used.num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=used.num_reasoning_tokens,
            accepted_prediction_tokens=used.num_predicted_tokens,
            rejected_prediction_tokens=num_rejected,
            discarded_tokens=generation.num_discarded_tokens,
        ),
    )


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


def _trace_fields(trace: DeltaTrace | None) -> bytes:
    """Write the fields behind the tokens of a traced chunk."""
    if trace is None:
        return b""
    body = b',"origins":' + _encode(trace.origins) + b',"steps":' + _encode(trace.steps)
    if trace.trees:
        body += b',"trees":' + escape_line_ends(_encode(trace.trees))
    return body


def _format_of(job: Job) -> Format:
    kind = ChatFormat if job.endpoint == "chat" else CompletionFormat
    return kind(job.tokenizer, job.num_top_logprobs)


class ChunkWriter:
    """Writes the events of one stream."""

    def __init__(
        self,
        generation: Generation,
        origin: RouteReason,
        *,
        with_usage: bool,
        with_running_usage: bool,
        with_trace: bool,
    ) -> None:
        """`with_usage`: a last chunk has the usage. `with_running_usage`: so has each before it."""
        self._generation = generation
        self._form = _format_of(generation.job)
        self._origin = origin
        self._with_usage = with_usage
        self._with_running_usage = with_running_usage
        self._with_trace = with_trace
        self._head = b""
        self._tail = (b',"usage":null' if with_usage else b"") + b"}\n\n"
        sent = origin.continues
        self._answer_id = generation.job.job_id if sent is None else sent.answer_id
        self._begun: set[int] = set() if sent is None else {0}
        self._num_open = len(generation.choices)

    def chunk(self, delta: Delta) -> bytes:
        """Write one event. Without a usage chunk, the last one carries the report."""
        self._head = self._head or self._begin()
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        reason = b"null" if delta.finish_reason is None else _encode(delta.finish_reason)
        if delta.stop is not None:
            reason += b',"stop_reason":' + encode_text(delta.stop)
        parts = [
            self._head,
            b'{"index":%d,' % delta.index,
            self._form.choice_body(delta, is_first=is_first),
            b',"finish_reason":' + reason + b"}]",
        ]
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open and not self._with_usage:
                parts.append(b',"outrider":' + _encode(report(self._generation, self._origin)))
        elif self._with_trace:
            pieces = b",".join(
                b"[" + encode_text(text) + (b",true]" if drafted else b",false]")
                for text, drafted in delta.pieces
            )
            parts += (b',"outrider":{"tokens":[', pieces, b"]", _trace_fields(delta.trace), b"}")
        if self._with_running_usage:
            parts += (b',"usage":', _encode(usage(self._generation)), b"}\n\n")
        else:
            parts.append(self._tail)
        return b"".join(parts)

    def _begin(self) -> bytes:
        """The beginning of all events. The first text decides which model they name."""
        job = self._generation.job
        return (
            b'data: {"id":'
            + _encode(self._answer_id)
            + b',"object":'
            + _encode(self._form.chunk_object)
            + f',"created":{job.created},"model":'.encode()
            + _encode(self._generation.model_id)
            + (b',"service_tier":' + _encode(job.service_tier) if job.service_tier else b"")
            + b',"choices":['
        )

    def ending(self) -> bytes:
        """Write the usage chunk, if it was asked for, and [DONE]."""
        if not self._with_usage:
            return DONE
        numbers = _encode(usage(self._generation))
        outrider = _encode(report(self._generation, self._origin))
        return self._head + b'],"usage":' + numbers + b',"outrider":' + outrider + b"}\n\n" + DONE


def whole_body(generation: Generation, origin: RouteReason, deltas: Iterable[Delta]) -> bytes:
    """Write the response without streaming."""
    job = generation.job
    by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_choice[delta.index].append(delta)
    fields: WholeFields = {
        "id": job.job_id,
        "created": job.created,
        "model": generation.model_id,
        "usage": usage(generation),
        "outrider": report(generation, origin),
        "service_tier": job.service_tier,
    }
    return _encode(_format_of(job).whole(by_choice, fields))
