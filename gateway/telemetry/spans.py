"""Names and attributes of a request's spans, in OpenTelemetry's terms.

The tree of one request:

    POST /v1/chat/completions       server    http.*, url.*, gen_ai.*, outrider.tier, .outcome
      route                                   the router's decision
      generate small                          one tier's work in the engine
        queue, prefill, decode                its parts, decode with the counts of its steps
      chat NAME                     client    one request to an upstream server

Names that start with gen_ai, http, server or error are OpenTelemetry's semantic conventions; all
others start with `outrider`. No text of a prompt or of an answer is among them (see `content`).
"""

from dataclasses import dataclass
from typing import Final, Literal

from outrider.gateway.telemetry.tracer import NO_ATTRIBUTES, Attributes, AttributeValue, Span

_PROVIDER: Final = "outrider"
_MAX_CHARS: Final = 128
"""The most characters of texts that clients choose: a model's name, an id."""
_SERVER_ERROR: Final = 500

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMarks:
    """The contents of a request."""

    request_id: str
    model: str
    """As the client named it."""
    operation: Operation = "chat"
    key_id: str = ""
    """The key's public id."""
    team_id: str | None = None
    is_streamed: bool = False
    num_choices: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMarks:
    """One local tier's work on a request. Times are moments on the gateway's clock, in seconds."""

    tier: str
    model: str
    started_s: float
    ended_s: float
    scheduled_s: float | None = None
    """None where it never got so far, or where it is unknown."""
    first_token_s: float | None = None
    """None where it never got so far, or where it is unknown."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_rows: int = 0
    num_discarded_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMarks:
    """The end of one request to an upstream server, as in `UpstreamAttempt`."""

    outcome: str
    ended_s: float
    first_token_s: float | None = None
    status: int | None = None
    failure: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMarks:
    """The result of a request."""

    status: int | None
    """HTTP's; None where the client left before there was one."""
    outcome: str
    tier: str | None = None
    reason: str | None = None
    hand_off: str | None = None
    answer_id: str | None = None
    finish_reasons: tuple[str, ...] = ()
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int | None = None
    ttft_s: float | None = None
    """From the request's arrival."""
    is_degraded: bool = False
    error_type: str | None = None


def record_http(span: Span, *, method: str, route: str, path: str, scheme: str, host: str) -> None:
    """Record on a request's span how it came. `host`: as the client named it."""
    if span.is_recording:
        name, _, port = host.rpartition(":")
        address = name if port.isdigit() else host
        span.set(
            {
                "http.request.method": method,
                "http.route": route,
                "url.path": path[:_MAX_CHARS],
                "url.scheme": scheme,
                "server.address": address.strip("[]")[:_MAX_CHARS],
            }
        )


def record_request(span: Span, marks: RequestMarks) -> None:
    """Record on a request's span what it asks for, as soon as it is read."""
    if not span.is_recording:
        return
    span.set(
        _known(
            {
                "gen_ai.operation.name": marks.operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": marks.model[:_MAX_CHARS],
                "gen_ai.request.stream": marks.is_streamed,
                "gen_ai.request.choice.count": marks.num_choices if marks.num_choices > 1 else None,
                "gen_ai.request.max_tokens": marks.max_tokens,
                "gen_ai.request.temperature": marks.temperature,
                "gen_ai.request.top_p": marks.top_p,
                "outrider.request.id": marks.request_id[:_MAX_CHARS],
                "outrider.key.id": marks.key_id or None,
                "outrider.team.id": marks.team_id,
            }
        )
    )


def record_route(
    span: Span,
    *,
    start_s: float,
    end_s: float,
    tier: str,
    reason: str,
    quality: float | None = None,
) -> None:
    """Record the span of a router's decision, which has been made already."""
    if not span.is_recording:
        return
    route = span.child("route", start_s=start_s)
    route.set(
        _known(
            {
                "outrider.tier": tier,
                "outrider.reason": reason,
                "outrider.quality": quality,
            }
        )
    )
    route.end(end_s)


def record_engine(span: Span, marks: EngineMarks) -> None:
    """Record the spans of one tier's work in the engine, which has ended already."""
    if not span.is_recording:
        return
    end_s = max(marks.ended_s, marks.started_s)
    work = span.child(f"generate {marks.tier}", start_s=marks.started_s)
    work.set(
        _known(
            {
                "gen_ai.response.model": marks.model or None,
                "gen_ai.usage.input_tokens": marks.num_prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": marks.num_cached_tokens,
                "gen_ai.usage.output_tokens": marks.num_output_tokens,
                "gen_ai.response.finish_reasons": _one(marks.finish_reason),
                "outrider.tier": marks.tier,
                "outrider.steps": marks.num_steps,
                "outrider.drafted_tokens": marks.num_drafted_tokens,
                "outrider.accepted_tokens": marks.num_accepted_tokens,
                "outrider.draft_rows": marks.num_draft_rows,
                "outrider.discarded_tokens": marks.num_discarded_tokens,
                "outrider.preemptions": marks.num_preemptions,
            }
        )
    )
    _record_parts(work, marks, end_s)
    if marks.error_type is not None:
        work.fail(marks.error_type)
    work.end(end_s)


def _record_parts(work: Span, marks: EngineMarks, end_s: float) -> None:
    """Record queue, prefill and decode, as far as it got."""
    moment_s = marks.started_s
    if marks.scheduled_s is not None or not marks.num_computed_tokens:
        scheduled_s = end_s if marks.scheduled_s is None else marks.scheduled_s
        moment_s = _part(work, "queue", moment_s, min(scheduled_s, end_s))
        if marks.scheduled_s is None:
            return
    counts: Attributes = {
        "outrider.computed_tokens": marks.num_computed_tokens,
        "outrider.cached_tokens": marks.num_cached_tokens,
    }
    first_s = end_s if marks.first_token_s is None else min(marks.first_token_s, end_s)
    moment_s = _part(work, "prefill", moment_s, first_s, counts)
    if marks.first_token_s is not None:
        counts = {
            "outrider.steps": marks.num_steps,
            "outrider.output_tokens": marks.num_output_tokens,
            "outrider.drafted_tokens": marks.num_drafted_tokens,
            "outrider.accepted_tokens": marks.num_accepted_tokens,
        }
        _part(work, "decode", moment_s, end_s, counts)


def begin_attempt(
    span: Span, *, tier: str, replica: str, kind: str, model: str, start_s: float
) -> Span:
    """Begin the span of one request to an upstream server; send its `headers` with it.

    `replica` is `host:port`.
    """
    if not span.is_recording:
        return span.child(f"chat {model}", kind="CLIENT", start_s=start_s)
    host, _, port = replica.rpartition(":")
    return span.child(
        f"chat {model}",
        kind="CLIENT",
        start_s=start_s,
        attributes=_known(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": tier,
                "gen_ai.request.model": model,
                "server.address": host or replica,
                "server.port": int(port) if port.isdigit() else None,
                "outrider.tier": tier,
                "outrider.attempt.kind": kind,
            }
        ),
    )


def end_attempt(span: Span, marks: AttemptMarks) -> None:
    """End the span of a request to an upstream server."""
    if span.is_recording:
        span.set(
            _known(
                {
                    "outrider.outcome": marks.outcome,
                    "http.response.status_code": marks.status,
                    "gen_ai.usage.input_tokens": marks.num_prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": marks.num_cached_tokens,
                    "gen_ai.usage.output_tokens": marks.num_completion_tokens,
                }
            )
        )
        if marks.first_token_s is not None:
            span.event("first_token", at_s=marks.first_token_s)
        if marks.outcome in ("failed", "refused"):
            span.fail(marks.failure or str(marks.status or marks.outcome))
    span.end(marks.ended_s)


def record_answer(span: Span, marks: AnswerMarks) -> None:
    """Record how a request ended: it is answered, or its client has left."""
    if span.is_recording:
        span.set(
            _known(
                {
                    "http.response.status_code": marks.status,
                    "gen_ai.response.id": marks.answer_id,
                    "gen_ai.response.finish_reasons": marks.finish_reasons or None,
                    "gen_ai.response.time_to_first_chunk": marks.ttft_s,
                    "gen_ai.usage.input_tokens": marks.num_prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": marks.num_cached_tokens,
                    "gen_ai.usage.output_tokens": marks.num_completion_tokens,
                    "outrider.tier": marks.tier,
                    "outrider.reason": marks.reason,
                    "outrider.hand_off": marks.hand_off,
                    "outrider.outcome": marks.outcome,
                    "outrider.degraded": marks.is_degraded or None,
                }
            )
        )
        if marks.error_type is not None:
            span.fail(marks.error_type)
        elif marks.status is not None and marks.status >= _SERVER_ERROR:
            span.fail(str(marks.status))


def _part(
    span: Span, name: str, start_s: float, end_s: float, attributes: Attributes = NO_ATTRIBUTES
) -> float:
    """Record a part of the work. Returns its end, which is never before its start."""
    end_s = max(start_s, end_s)
    span.child(name, start_s=start_s, attributes=attributes).end(end_s)
    return end_s


def _known(attributes: dict[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Return the attributes that are not None."""
    return {name: value for name, value in attributes.items() if value is not None}


def _one(word: str | None) -> tuple[str, ...] | None:
    return None if word is None else (word,)
