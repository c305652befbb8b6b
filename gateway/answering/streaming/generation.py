"""One API request while the engine works on it: the text of all its choices, and its figures."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Self

from outrider.gateway.answering.jobs.job import ChoicePlan, Job
from outrider.gateway.answering.streaming.choice import Choice
from outrider.gateway.answering.streaming.choice_stream import ChoiceStream, WatchUsage
from outrider.gateway.answering.streaming.choice_usage import ChoiceUsage
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.streaming.fan_in import merge
from outrider.gateway.answering.streaming.watched_stream import WatchedStream
from outrider.gateway.contract.answers.responder import AnswerEscalated
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.verifier.params import Tier

__all__ = ["Choice", "ChoicePlan", "Delta", "Generation", "Job"]


class Generation:
    """One API request while the engine works on it. Entered while its `steps` are read."""

    def __init__(
        self,
        engine: EngineClient,
        job: Job,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self.outcome = "abort"
        self.failure = ""
        choices = range(len(job.choices))
        self._streams: list[ChoiceStream]
        if job.watch is None:
            self._streams = [ChoiceStream(i, job, engine, metrics, clock) for i in choices]
        else:
            self._streams = [
                WatchedStream(i, job, engine, metrics, clock, job.watch) for i in choices
            ]
        self._metrics = metrics
        self._clock = clock

    def steps(self) -> AsyncGenerator[Sequence[Delta]]:
        """Yield the text of all choices as it comes. Closing this aborts what still runs.

        Raises the engine's refusal, EngineLostError or GenerationError, and AnswerEscalated where
        an upstream tier answers in its place.
        """
        streams = [stream.steps() for stream in self._streams]
        return streams[0] if len(streams) == 1 else merge(streams)

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note how it ended; what was closed or cancelled before its end was aborted."""
        if error is None:
            self.outcome = "stop"
        elif isinstance(error, AnswerEscalated):
            self.outcome = "handed_over"
        elif isinstance(error, Exception):
            self.outcome = "error"
            self.failure = str(getattr(error, "code", None) or type(error).__name__)
        self._record()

    @property
    def choices(self) -> list[Choice]:
        """The choices as they are answered now; of those that were escalated, the large tier's."""
        if len(self._streams) == 1:  # by far the most requests
            return [self._streams[0].choice]
        return [stream.choice for stream in self._streams]

    @property
    def watches(self) -> list[WatchUsage]:
        """The result of the watch of each choice."""
        if len(self._streams) == 1:
            return [self._streams[0].watch]
        return [stream.watch for stream in self._streams]

    @property
    def usage(self) -> ChoiceUsage:
        """The usage of all choices together."""
        if len(self._streams) == 1:
            return self._streams[0].choice.usage
        return ChoiceUsage.total([stream.choice.usage for stream in self._streams])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Keywords of lenient schemas that the grammar leaves out, as `place#pointer`."""
        return self._streams[0].left_out

    @property
    def is_escalated(self) -> bool:
        """True if the watch has given one of the small model's answers up."""
        return self.job.watch is not None and any(usage.escalated for usage in self.watches)

    @property
    def num_held_tokens(self) -> int:
        """Tokens that waited for the watch's decision."""
        if self.job.watch is None:
            return 0
        return sum(usage.num_held_tokens for usage in self.watches)

    @property
    def written(self) -> dict[Tier, int]:
        """The number of tokens, of the choices as they stand, that each tier has written."""
        written: dict[Tier, int] = {}
        for stream in self._streams:
            for tier, num_tokens in stream.written:
                written[tier] = written.get(tier, 0) + num_tokens
        return written

    @property
    def writers(self) -> list[tuple[tuple[Tier, int], ...]]:
        """The tiers that wrote each choice, and how many tokens each."""
        return [stream.written for stream in self._streams]

    @property
    def is_degraded(self) -> bool:
        """True if an upstream tier should have answered instead, and could not."""
        return self.job.watch is not None and any(s.is_degraded for s in self._streams)

    @property
    def tier(self) -> Tier:
        """The answering tier: of several choices, the large tier if it answers any."""
        for stream in self._streams:
            if stream.tier == "large":
                return "large"
        return "small"

    @property
    def model_id(self) -> str:
        """The checkpoint behind `tier`."""
        target = self.job.escalation
        return target.model_id if target and self.tier == target.tier else self.job.model_id

    @property
    def numerics(self) -> str:
        """The arithmetic of that checkpoint; empty where it is not known."""
        tier = self.tier
        found = (stream.choice.numerics for stream in self._streams if stream.tier == tier)
        return next(found, "")

    @property
    def reason(self) -> str:
        """The reason for this tier: the route's, then the watch's. One line for a header."""
        if self.job.watch is None:
            return self.job.reason
        said = [usage for usage in self.watches if usage.reason is not None]
        if not said:
            return self.job.reason
        escalated = [usage for usage in said if usage.escalated]
        reason = f"{self.job.reason}; {(escalated or said)[0].reason}"
        if len(self._streams) > 1:
            reason += f" ({len(escalated)} of {len(self._streams)} choices escalated)"
        return reason

    @property
    def confidence(self) -> float | None:
        """The watch's last word on the choice that it trusted least; None without a watch."""
        if self.job.watch is None:
            return None
        said = [usage.confidence for usage in self.watches if usage.confidence is not None]
        return min(said, default=None)

    @property
    def num_discarded_tokens(self) -> int:
        """Tokens of the small model that are in no answer: given up, and not written again."""
        if self.job.watch is None:
            return 0
        return sum(
            max(stream.watch.num_retracted_tokens - stream.choice.usage.num_reused_tokens, 0)
            for stream in self._streams
        )

    def ttft_s(self) -> float | None:
        """Seconds from arrival at the gateway to the first token that any choice could send."""
        first_s = self.usage.first_token_s
        return None if first_s is None else first_s - self.job.arrival_s

    def inter_token_s(self) -> float | None:
        """Seconds between two tokens of a choice, in the mean; None where none has two."""
        total_s, num_gaps = 0.0, 0
        for choice in self.choices:
            usage = choice.usage
            if usage.first_token_s is not None and usage.last_token_s is not None:
                total_s += usage.last_token_s - usage.first_token_s
                num_gaps += max(usage.num_tokens - 1, 0)
        return total_s / num_gaps if num_gaps else None

    @property
    def is_cut_by_limit(self) -> bool:
        """True if an answer ended where its tenant's limit did."""
        return self.job.allowance is not None and self.job.allowance.is_used_up

    def duration_s(self) -> float:
        """Seconds since the request's arrival."""
        return self._clock() - self.job.arrival_s

    def _record(self) -> None:
        """Record the end in the metrics. A choice that did not finish has the outcome's name."""
        is_handed_over = self.outcome == "handed_over"
        metrics = self._metrics.of_tier(self.tier)
        if not is_handed_over:
            metrics.e2e_request_latency.observe(self.duration_s())
        metrics.prompt_tokens.inc(self.job.num_prompt_tokens)
        for stream in self._streams:
            usage = stream.choice.usage
            metrics = self._metrics.of_tier(stream.tier)
            if not is_handed_over:  # else its tokens are in no answer
                metrics.generation_tokens.inc(usage.num_tokens)
            metrics.finished(stream.choice.finish_reason or self.outcome)
            if usage.queue_s is not None:
                metrics.request_queue_time.observe(usage.queue_s)
        if self.job.watch is not None:
            self._metrics.cascade_ended(self.usage.num_reused_tokens, self.num_discarded_tokens)
