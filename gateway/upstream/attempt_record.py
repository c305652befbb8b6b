"""The record of one request to one replica: its usage, and its end."""

import logging
from dataclasses import replace
from math import ceil
from typing import Final

from outrider.gateway.contract.errors.tree import DeadlineExceededError
from outrider.gateway.telemetry.spans import AttemptMarks, begin_attempt, end_attempt
from outrider.gateway.upstream.attempts import AttemptKind, AttemptOutcome, UpstreamAttempt
from outrider.gateway.upstream.call import UpstreamCall, WholeAnswer, num_answers
from outrider.gateway.upstream.replicas import Lease
from outrider.gateway.upstream.tier_parts import TierState
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import UsageMeter, cost_usd

logger = logging.getLogger(__name__)

_MOST_TOKENS_PER_S: Final = 100
"""Tokens assumed to be written, and charged, of a whole answer that was given up."""
_TICK_S: Final = 0.005
"""Timers may fire a little early."""


class AttemptRecord:
    """Counts what an attempt uses, and books it exactly once."""

    __slots__ = (
        "_call",
        "_has_whole",
        "_kind",
        "_lease",
        "_tier",
        "_usage",
        "is_booked",
        "meter",
        "num_repeated_tokens",
        "span",
        "status",
    )

    def __init__(
        self,
        tier: TierState,
        call: UpstreamCall,
        lease: Lease,
        *,
        kind: AttemptKind,
        num_repeated_tokens: int,
    ) -> None:
        """Store the arguments. `num_repeated_tokens` at the start are of the attempt before."""
        self._tier = tier
        self._call = call
        self._lease = lease
        self._kind: AttemptKind = kind
        self._usage: UpstreamUsage | None = None
        self._has_whole = False
        self.is_booked = False
        self.num_repeated_tokens = num_repeated_tokens
        self.status: int | None = None
        """The HTTP status of the server's response."""
        # A continuation's prompt is longer than the call's: its report cannot be held against that.
        count_prompt = None if kind == "continuation" else tier.parts.count_prompt
        media_tokens = tier.settings.media_tokens
        self.meter = UsageMeter(call, tier.parts.count_text, count_prompt, media_tokens)
        self.span = begin_attempt(
            call.span,
            tier=tier.name,
            replica=lease.replica.name,
            kind=kind,
            model=call.model,
            start_s=lease.started_s,
        )

    @property
    def usage(self) -> UpstreamUsage:
        """Return the usage so far. Counts the text again until the attempt is booked."""
        return self._usage or self.meter.result()

    def add_whole(self, answer: WholeAnswer) -> None:
        """Count an answer that is not streamed."""
        self._has_whole = True
        self.meter.add_whole(answer)

    def book(self, outcome: AttemptOutcome, failure: str | None = None) -> None:
        """Book the attempt, once."""
        if self.is_booked:
            return
        self.is_booked = True
        tier, lease = self._tier, self._lease
        ended_s = tier.parts.clock()
        if outcome == "cancelled" and self._is_late(ended_s):
            failure = DeadlineExceededError.CODE
        # A server that failed before its first token is not paid; one that was given up is.
        if outcome not in ("failed", "refused") or lease.first_token_s is not None:
            self._usage = self._usage_until(ended_s)
        usage = self._usage
        if outcome == "failed":
            logger.warning(
                "upstream failed tier=%s replica=%s kind=%s failure=%s status=%s",
                tier.name,
                lease.replica.name,
                self._kind,
                failure,
                self.status,
            )
        attempt = UpstreamAttempt(
            request_id=self._call.request_id,
            tier=tier.name,
            replica=lease.replica.name,
            kind=self._kind,
            outcome=outcome,
            started_s=lease.started_s,
            ended_s=ended_s,
            first_token_s=lease.first_token_s,
            status=self.status,
            failure=failure,
            usage=usage,
            cost_usd=None if usage is None else cost_usd(usage, tier.settings.price),
            model=self._call.model,
            num_repeated_tokens=self.num_repeated_tokens,
        )
        tier.parts.on_attempt(attempt)
        if self._call.on_attempt is not None:
            self._call.on_attempt(attempt)
        if self.span.is_recording:
            self._end_span(attempt)

    def _is_late(self, now_s: float) -> bool:
        deadline_s = self._call.deadline_s
        return deadline_s is not None and now_s >= deadline_s - _TICK_S

    def _usage_until(self, now_s: float) -> UpstreamUsage:
        """Return the usage; for an unstreamed answer that is missing, an upper estimate."""
        usage = self.meter.result()
        if self._call.is_streamed or self._has_whole or self._call.untold is not None:
            return usage
        num_tokens = ceil((now_s - self._lease.started_s) * _MOST_TOKENS_PER_S)
        if (limit := self._call.token_limit) is not None:
            num_tokens = min(num_tokens, limit)
        num_tokens *= num_answers(self._call)
        return replace(usage, num_completion_tokens=num_tokens)

    def _end_span(self, attempt: UpstreamAttempt) -> None:
        usage = attempt.usage
        end_attempt(
            self.span,
            AttemptMarks(
                outcome=attempt.outcome,
                ended_s=attempt.ended_s,
                first_token_s=attempt.first_token_s,
                status=attempt.status,
                failure=attempt.failure,
                num_prompt_tokens=None if usage is None else usage.num_prompt_tokens,
                num_cached_tokens=None if usage is None else usage.num_cached_tokens,
                num_completion_tokens=None if usage is None else usage.num_completion_tokens,
            ),
        )
