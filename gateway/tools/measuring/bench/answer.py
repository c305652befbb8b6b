"""One request's answer: the events of a stream, parsed after the clock has stopped."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from outrider.gateway.tools.measuring.bench.results import ErrorKind, RequestRow, rounded
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest
from outrider.gateway.upstream.event_stream import EventSplitter, event_data

_MOST_MESSAGE_CHARS: Final = 200
_Number = int | float | None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def has_tokens(self) -> bool:
        """True if the model wrote text, reasoning, a refusal or a tool call."""
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.refusal
            or self.tool_calls
        )


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """True if this event carries model output."""
        said = self.delta or self.message
        return bool(self.text) or (said is not None and said.has_tokens)


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Number = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Number = None
    completion_tokens: _Number = None
    prompt_tokens_details: _PromptDetails | None = None


class _Report(msgspec.Struct):
    """The parts of the `outrider` report that are used here; never a trace of tokens."""

    tier: str | None = None
    reason: str | None = None
    escalated: bool | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    mean_emitted_tokens: float | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    cost_usd: float | None = None


class _Chunk(msgspec.Struct):
    id: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    outrider: _Report | None = None
    error: Any = None


_read: Final = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """Bytes and moments, in seconds of the run's clock."""

    sent_s: float | None = None
    ended_s: float = 0.0
    status: int | None = None
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """What came, each piece with its moment."""
    error: ErrorKind | None = None
    """What went wrong on the way."""
    message: str = ""
    """The error in words."""

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Say what went wrong; the first word counts."""
        if self.error is None:
            self.error, self.message = kind, message[:_MOST_MESSAGE_CHARS]


@dataclass(slots=True)
class _Reading:
    """State collected from the events of one answer so far."""

    token_times: list[float] = field(default_factory=list)
    finish_s: float | None = None
    finish_reason: str | None = None
    is_done: bool = False
    request_id: str = ""
    usage: _Usage | None = None
    report: _Report | None = None
    error: Any = None

    def take(self, arrived_s: float, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self.error = chunk.error
        if not self.request_id and isinstance(chunk.id, str):
            self.request_id = chunk.id
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.outrider is not None and chunk.outrider.tier is not None:
            self.report = chunk.outrider
        has_tokens = False
        for choice in chunk.choices or ():
            has_tokens = has_tokens or choice.has_tokens
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.finish_s = arrived_s
        if has_tokens:
            self.token_times.append(arrived_s)


def error_text(value: Any) -> str:
    """The message in an error's JSON, whatever its shape."""
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        return str(inner)[:_MOST_MESSAGE_CHARS]
    return str(value)[:_MOST_MESSAGE_CHARS]


def body_text(body: bytes) -> str:
    """The message in the body of a refusal."""
    try:
        return error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:_MOST_MESSAGE_CHARS].decode(errors="replace").strip()


def make_row(
    raw: RawAnswer,
    *,
    index: int,
    scheduled_s: float,
    planned: PlannedRequest,
    is_stream: bool,
    is_warm_up: bool = False,
    arm: str = "",
) -> RequestRow:
    """Read what came. What is not an answer gets the kind of its failure."""
    reading = _Reading()
    if raw.error is None or raw.pieces:
        _read_pieces(raw, reading, is_stream)
    if raw.error is None:
        _judge(raw, reading, is_stream)
    times = reading.token_times if is_stream else []
    if is_stream and not times and reading.finish_s is not None:
        times = [reading.finish_s]  # tokens without text: all that can be seen is the end
    usage, report = reading.usage, reading.report or _Report()
    counted = None if usage is None else _whole(usage.completion_tokens)
    details = None if usage is None else usage.prompt_tokens_details
    return RequestRow(
        index=index,
        scheduled_s=_exact(scheduled_s),
        sent_s=_maybe(raw.sent_s),
        first_s=_maybe(times[0] if times else None),
        last_s=_maybe(times[-1] if times else None),
        ended_s=_exact(raw.ended_s),
        gaps_ms=[round(1e3 * (later - earlier), 3) for earlier, later in itertools.pairwise(times)],
        category=planned.category,
        is_warm_up=is_warm_up,
        arm=arm,
        error=raw.error,
        status=raw.status,
        message=raw.message,
        request_id=reading.request_id,
        num_prompt_tokens=None if usage is None else _whole(usage.prompt_tokens),
        num_cached_tokens=None if details is None else _whole(details.cached_tokens),
        num_completion_tokens=len(reading.token_times) if counted is None else counted,
        token_source="chunks" if counted is None else "usage",
        planned_prompt_tokens=planned.num_prompt_tokens,
        planned_completion_tokens=planned.num_completion_tokens,
        finish_reason=reading.finish_reason,
        num_drafted_tokens=report.drafted_tokens,
        num_accepted_tokens=report.accepted_tokens,
        mean_emitted_tokens=report.mean_emitted_tokens,
        tier=report.tier,
        reason=report.reason,
        is_escalated=report.escalated,
        server_ttft_ms=_milliseconds(report.ttft_s),
        server_queue_ms=_milliseconds(report.queue_s),
        cost_usd=report.cost_usd,
    )


def _read_pieces(raw: RawAnswer, reading: _Reading, is_stream: bool) -> None:
    try:
        if not is_stream:
            body = b"".join(data for _, data in raw.pieces)
            if raw.error is None:
                reading.take(raw.ended_s, _read(body))
            return
        for arrived_s, data in _events(raw.pieces):
            if data == b"[DONE]":
                reading.is_done = True
            else:
                reading.take(arrived_s, _read(data))
    except msgspec.DecodeError as error:
        raw.fail("garbage", f"an event is not a chunk of a chat completion: {error}")


def _events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    splitter = EventSplitter()
    events = []
    for arrived_s, piece in pieces:
        for event in splitter.push(piece):
            data = event_data(event)
            if data is not None:
                events.append((arrived_s, data))
    if pieces:
        last_s = pieces[-1][0]
        events += [(last_s, d) for e in splitter.finish() if (d := event_data(e)) is not None]
    return events


def _judge(raw: RawAnswer, reading: _Reading, is_stream: bool) -> None:
    """Mark the answer as failed unless it is complete."""
    counted = 0 if reading.usage is None else _whole(reading.usage.completion_tokens) or 0
    if reading.error is not None:
        raw.fail("server_error", error_text(reading.error))
    elif is_stream and not reading.is_done and reading.finish_reason is None:
        raw.fail("broken", "the stream ended before the answer did")
    elif not is_stream and reading.finish_reason is None and not reading.token_times:
        raw.fail("garbage", "the body is not a chat completion")
    elif not reading.token_times and not counted:
        raw.fail("empty", "the answer has no token")


def _whole(value: _Number) -> int | None:
    return None if value is None or value < 0 else int(value)


def _exact(value: float) -> float:
    """To the microsecond."""
    return round(value, 6)


def _maybe(value: float | None) -> float | None:
    return None if value is None else _exact(value)


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else rounded(1e3 * value)
