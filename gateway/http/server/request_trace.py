"""One API request for operators: its trace, and its text where that is captured."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.telemetry.capture import Capture, Exchange, Recording
from outrider.gateway.telemetry.spans import AnswerMarks, record_answer
from outrider.gateway.telemetry.tracer import NULL_SPAN, Span
from outrider.gateway.tenancy.metering.meter import RequestMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """The identity of the request. `body` is as the client sent it, JSON in the API's format."""

    request_id: str
    key_id: str
    endpoint: str
    body: bytes


class RequestTrace:
    """Follows a request, whose end it passes on to the request's account."""

    def __init__(
        self,
        request: TracedRequest,
        span: Span,
        capture: Capture,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        meter: RequestMeter,
    ) -> None:
        """`clock`: the gateway's; `wall_clock`: seconds since 1970. `meter`: the account."""
        self.span = span
        self.recording: Recording | None = None
        """Gets every part of the answer, as chat or completion; None where text is not captured."""
        self._request = request
        self._capture = capture
        self._clock = clock
        self._wall_clock = wall_clock
        self._meter = meter
        self._is_streamed = False
        self._is_kept = False
        self._is_shown = False

    def planned(self, *, is_private: bool, is_streamed: bool) -> None:
        """Note that it will be answered. A private request is not captured."""
        self._is_streamed = is_streamed
        self._is_kept = self._capture.wants(is_private=is_private)
        shows_texts = self._capture.shows_texts and not is_private
        self._is_shown = shows_texts and self.span.is_recording
        if self._is_kept or self._is_shown:
            self.recording = Recording()

    def note_outcome(
        self,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None = None,
    ) -> None:
        """Note the response's end. `status` is the one sent; `error` is the one that ended it."""
        self._meter.note_outcome(facts, outcome, status, error)
        if self.span.is_recording:
            record_answer(self.span, _marks(facts, outcome, status, error))
        if not self._is_shown:
            self.span.end()
        if self.recording is not None:
            request = self._request
            self._capture.offer(
                Exchange(
                    request_id=request.request_id,
                    endpoint=request.endpoint,
                    ended_at=self._wall_clock(),
                    request=request.body,
                    answer=self.recording.answer,
                    is_private=False,
                    is_kept=self._is_kept,
                    span=self.span if self._is_shown else NULL_SPAN,
                    ended_s=self._clock(),
                    is_streamed=self._is_streamed,
                    is_cut=self.recording.is_cut,
                    key_id=request.key_id,
                    tier="" if facts is None else facts.tier,
                    outcome=outcome,
                )
            )


def _marks(
    facts: AnswerFacts | None, outcome: str, status: int | None, error: BaseException | None
) -> AnswerMarks:
    error_type = None
    if isinstance(error, Exception):
        problem = problem_of(error)
        error_type = problem.code or type(error).__name__
        status = problem.status if status is None else status
    if facts is None:
        return AnswerMarks(status=status, outcome=outcome, error_type=error_type)
    return AnswerMarks(
        status=status,
        outcome=outcome,
        tier=facts.tier,
        reason=facts.reason,
        hand_off=facts.hand_off,
        answer_id=facts.job_id,
        num_completion_tokens=facts.num_tokens,
        ttft_s=facts.ttft_s,
        is_degraded=facts.is_degraded,
        error_type=error_type,
    )
