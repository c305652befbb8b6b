"""Deltas to the bytes of OpenAI's responses: stream events and whole bodies.

A stream repeats the same 150 bytes in every event, so they are built once; what changes goes
through msgspec. This runs for each token of each client.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import chain
from typing import Final, Protocol, TypedDict

import msgspec

from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.streaming.answer_report import outrider_report, usage_report
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.streaming.receipt_draft import ReceiptDraft
from outrider.gateway.answering.streaming.token_fields import TokenFields
from outrider.gateway.answering.streaming.trace import DeltaTrace
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.contract.schema.line_ends import escape_line_ends
from outrider.gateway.contract.schema.responses import (
    ChatChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatMessage,
    Completion,
    CompletionChoice,
    FunctionCall,
    OutriderReport,
    ReportedServiceTier,
    ToolCall,
    Usage,
)

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


@lru_cache(maxsize=256)
def system_fingerprint(numerics: str) -> str | None:
    """Return a short name of the arithmetic behind an answer; None where it is not known."""
    return f"fp_{sha256(numerics.encode()).hexdigest()[:16]}" if numerics else None


class WholeFields(TypedDict):
    """The fields of a whole answer that chat and completions share."""

    id: str
    created: int
    model: str
    usage: Usage
    outrider: OutriderReport
    service_tier: ReportedServiceTier | None
    system_fingerprint: str | None


Completed = ChatCompletion | Completion


class Format(Protocol):
    """Writes one endpoint's choices; chat and completions share the rest."""

    chunk_object: str

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write the chunk's choice after its index, from the text to the log-probabilities."""

    def choice_fields(self, delta: Delta) -> bytes:
        """Write the fields at the end of the chunk's choice that were asked for beside it."""

    def chunk_fields(self, delta: Delta) -> bytes:
        """Write those at the end of the chunk."""

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the response without streaming."""


def _joined(deltas: Iterable[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


class _TokenFormat:
    """What both endpoints' formats know of the fields that name tokens."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._has_logprobs = job.num_top_logprobs is not None
        self._has_extras = job.extras.has_prompt

    @cached_property
    def _fields(self) -> TokenFields:
        """Written only where they are asked for."""
        return TokenFields(self._job)


class ChatFormat(_TokenFormat):
    """Messages with log-probabilities token by token."""

    chunk_object = "chat.completion.chunk"

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write `"delta":{…},"logprobs":…`; the first one also says the role."""
        body = self._body(delta) if delta.text or is_first else b""
        role = b'"role":"assistant",' if is_first else b""
        if is_first and delta.kind == "call":
            role += b'"content":null,'
        logprobs = b"null"
        if delta.logprobs and self._has_logprobs:
            logprobs = _encode(self._fields.of_chat([delta]))
        return b'"delta":{' + role + body + b'},"logprobs":' + logprobs

    def _body(self, delta: Delta) -> bytes:
        """Write the one field of a delta that has text; a call begins with its name."""
        text = encode_text(delta.text)
        match delta.kind:
            case "content" | "prompt":
                return b'"content":' + text
            case "reasoning":
                if self._job.reasoning_field == "both":
                    return b'"reasoning_content":' + text + b',"reasoning":' + text
                return b'"%s":' % self._job.reasoning_field.encode() + text
            case "call":
                function = b'{"name":' + text + b',"arguments":""}'
                head = b'"id":' + _encode(delta.call_id) + b',"type":"function",'
            case "arguments":
                function = b'{"arguments":' + text + b"}"
                head = b""
        if self._job.names_functions:
            return b'"function_call":' + function
        call = b'{"index":%d,' % delta.call_index + head + b'"function":' + function + b"}"
        return b'"tool_calls":[' + call + b"]"

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the messages."""
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        answer = ChatCompletion(object="chat.completion", choices=choices, **fields)
        if self._has_extras:
            answer.prompt_logprobs = self._fields.prompt_logprobs(by_choice[0])
            answer.prompt_token_ids = self._fields.prompt_token_ids(by_choice[0])
        return answer

    def choice_fields(self, delta: Delta) -> bytes:
        """Write the answer's ids."""
        return self._fields.chunk_fields(delta, _encode, of_prompt=False)

    def chunk_fields(self, delta: Delta) -> bytes:
        """Write what is said of the one prompt."""
        return self._fields.chunk_fields(delta, _encode, of_prompt=True)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        """Return the choice; with `reasoning_content` and `tool_calls` only if it has any."""
        calls = [_call(call, deltas) for call in deltas if call.kind == "call"]
        content, end = _joined(deltas, "content"), deltas[-1]
        assert end.finish_reason is not None, "the answer is over"
        thoughts, field = _joined(deltas, "reasoning") or None, self._job.reasoning_field
        named = calls[0].function if calls and self._job.names_functions else None
        return ChatChoice(
            index=index,
            message=ChatMessage(
                role="assistant",
                content=None if calls and not content else content,
                refusal=None,
                reasoning_content=None if field == "reasoning" else thoughts,
                reasoning=None if field == "reasoning_content" else thoughts,
                tool_calls=calls or None if named is None else None,
                function_call=named,
            ),
            logprobs=self._fields.of_chat(deltas) if self._has_logprobs else None,
            finish_reason=_finish_reason(self._job, end.finish_reason),
            stop_reason=end.stop,
            token_ids=self._fields.token_ids(deltas) if self._has_extras else None,
            judgements=self._fields.judgements(deltas) if self._has_extras else None,
        )


def _finish_reason(job: Job, reason: ChatFinishReason) -> ChatFinishReason:
    return "function_call" if reason == "tool_calls" and job.names_functions else reason


def _call(call: Delta, deltas: Sequence[Delta]) -> ToolCall:
    arguments = "".join(
        delta.text
        for delta in deltas
        if delta.kind == "arguments" and delta.call_index == call.call_index
    )
    function = FunctionCall(name=call.text, arguments=arguments)
    return ToolCall(id=call.call_id, type="function", function=function)


class CompletionFormat(_TokenFormat):
    """Text with log-probabilities as parallel lists."""

    chunk_object = "text_completion"

    def choice_body(self, delta: Delta, *, is_first: bool) -> bytes:
        """Write `"text":…,"logprobs":…`."""
        logprobs = b"null"
        if (delta.logprobs or delta.prompt is not None) and self._has_logprobs:
            logprobs = _encode(self._fields.of_completion(delta.index, [delta]))
        return b'"text":' + encode_text(delta.text) + b',"logprobs":' + logprobs

    def whole(self, by_choice: Mapping[int, Sequence[Delta]], fields: WholeFields) -> Completed:
        """Return the continuations."""
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return Completion(object="text_completion", choices=choices, **fields)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        end = deltas[-1]
        assert end.finish_reason != "tool_calls", "a completion offers no tools"
        choice = CompletionChoice(
            index=index,
            text=_joined(deltas, "prompt") + _joined(deltas, "content"),
            logprobs=self._fields.of_completion(index, deltas) if self._has_logprobs else None,
            finish_reason=end.finish_reason,
            stop_reason=end.stop,
        )
        if self._has_extras:
            choice.prompt_logprobs = self._fields.prompt_logprobs(deltas)
            choice.prompt_token_ids = self._fields.prompt_token_ids(deltas)
            choice.token_ids = self._fields.token_ids(deltas)
            choice.judgements = self._fields.judgements(deltas)
        return choice

    def choice_fields(self, delta: Delta) -> bytes:
        """Write what is said of the choice's prompt, and its ids."""
        fields = self._fields
        of_prompt = fields.chunk_fields(delta, _encode, of_prompt=True)
        return of_prompt + fields.chunk_fields(delta, _encode, of_prompt=False)

    def chunk_fields(self, delta: Delta) -> bytes:
        """Write nothing: every choice may have a prompt of its own."""
        return b""


def _trace_fields(trace: DeltaTrace | None) -> bytes:
    """Write the fields behind the tokens of a traced chunk."""
    if trace is None:
        return b""
    body = b',"origins":' + _encode(trace.origins) + b',"steps":' + _encode(trace.steps)
    if trace.trees:
        body += b',"trees":' + escape_line_ends(_encode(trace.trees))
    return body


def _format_of(job: Job) -> Format:
    return ChatFormat(job) if job.endpoint == "chat" else CompletionFormat(job)


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
        begins_with_usage: bool = False,
    ) -> None:
        """`with_usage`: a last chunk has the usage. `with_running_usage`: so has each before it.

        `begins_with_usage`: so has each choice's first one.
        """
        self._generation = generation
        terms = generation.job.receipt
        self._receipt = None if terms is None else ReceiptDraft(generation.job, terms)
        self._form = _format_of(generation.job)
        self._has_extras = generation.job.extras.has_prompt
        self._origin = origin
        self._with_usage = with_usage
        self._with_running_usage = with_running_usage
        self._begins_with_usage = begins_with_usage
        self._with_trace = with_trace
        self._head = b""
        self._tail = (b',"usage":null' if with_usage else b"") + b"}\n\n"
        job = generation.job
        has_more = self._has_extras or with_trace or with_running_usage
        self._is_plain = job.endpoint == "chat" and job.num_top_logprobs is None and not has_more
        self._text_heads: dict[int, bytes] = {}
        """What stands in front of a text, by choice, where nothing but texts differs."""
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        sent = origin.continues
        self._answer_id = generation.job.job_id if sent is None else sent.answer_id
        self._begun: set[int] = set() if sent is None else {0}
        self._num_open = len(generation.choices)

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """Write an event for each delta of a step. This runs for each step of each client."""
        if self._receipt is not None:
            self._receipt.note(deltas)
        if len(deltas) == 1:
            return self._chunk(deltas[0])
        return b"".join(map(self._chunk, deltas))

    def _chunk(self, delta: Delta) -> bytes:
        """Write one event. Without a usage chunk, the last one carries the report."""
        text_head = self._text_heads.get(delta.index)
        if text_head and delta.kind == "content" and delta.text and delta.finish_reason is None:
            return text_head + encode_text(delta.text) + self._text_tail
        self._head = self._head or self._begin()
        is_first = delta.index not in self._begun
        if is_first:
            self._begun.add(delta.index)
        if self._is_plain:
            text_head = self._head + b'{"index":%d,"delta":{"content":' % delta.index
            self._text_heads[delta.index] = text_head
        body = self._form.choice_body(delta, is_first=is_first)
        parts = [self._head, b'{"index":%d,' % delta.index, body, self._reason(delta)]
        if self._has_extras:
            parts += (self._form.choice_fields(delta), b"}]", self._form.chunk_fields(delta))
        else:
            parts += (b"}]",)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open and not self._with_usage:
                parts += (b',"outrider":', self._report())
        elif self._with_trace:
            pieces = b",".join(
                b"[" + encode_text(text) + (b",true]" if drafted else b",false]")
                for text, drafted in delta.pieces
            )
            parts += (b',"outrider":{"tokens":[', pieces, b"]", _trace_fields(delta.trace), b"}")
        if self._with_running_usage or (is_first and self._begins_with_usage):
            parts += (b',"usage":', _encode(usage_report(self._generation)), b"}\n\n")
        else:
            parts += (self._tail,)
        return b"".join(parts)

    def _report(self) -> bytes:
        """Write the `outrider` object."""
        return _encode(outrider_report(self._generation, self._origin, self._receipt))

    def _reason(self, delta: Delta) -> bytes:
        """Write why the choice ended, where it did."""
        if delta.finish_reason is None:
            return b',"finish_reason":null'
        reason = _encode(_finish_reason(self._generation.job, delta.finish_reason))
        stop = b"" if delta.stop is None else b',"stop_reason":' + encode_text(delta.stop)
        return b',"finish_reason":' + reason + stop

    def _begin(self) -> bytes:
        """The beginning of all events. The first text decides which model they name."""
        job, fingerprint = self._generation.job, system_fingerprint(self._generation.numerics)
        return (
            b'data: {"id":'
            + _encode(self._answer_id)
            + b',"object":'
            + _encode(self._form.chunk_object)
            + f',"created":{job.created},"model":'.encode()
            + _encode(self._generation.model_id)
            + (b',"service_tier":' + _encode(job.service_tier) if job.service_tier else b"")
            + (b',"system_fingerprint":' + _encode(fingerprint) if fingerprint else b"")
            + b',"choices":['
        )

    def ending(self) -> bytes:
        """Write the usage chunk, if it was asked for, and [DONE]."""
        if not self._with_usage:
            return DONE
        numbers = _encode(usage_report(self._generation))
        outrider = self._report()
        return self._head + b'],"usage":' + numbers + b',"outrider":' + outrider + b"}\n\n" + DONE


def whole_body(generation: Generation, origin: RouteReason, deltas: Iterable[Delta]) -> bytes:
    """Write the response without streaming."""
    job = generation.job
    by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        by_choice[delta.index].append(delta)
    receipt = None if job.receipt is None else ReceiptDraft(job, job.receipt)
    if receipt is not None:
        receipt.note(chain.from_iterable(by_choice.values()))
    fields: WholeFields = {
        "id": job.job_id,
        "created": job.created,
        "model": generation.model_id,
        "usage": usage_report(generation),
        "outrider": outrider_report(generation, origin, receipt),
        "service_tier": job.service_tier,
        "system_fingerprint": system_fingerprint(generation.numerics),
    }
    return _encode(_format_of(job).whole(by_choice, fields))
