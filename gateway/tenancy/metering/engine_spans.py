"""The engine's work on a request, as spans of its trace."""

from collections.abc import Iterator

from outrider.engine.events import RequestStats
from outrider.gateway.telemetry.spans import EngineMarks, record_engine
from outrider.gateway.telemetry.tracer import Span
from outrider.gateway.tenancy.metering.local_work import Ended, LocalWork
from outrider.gateway.tenancy.metering.rows import LocalAnswer
from outrider.verifier.params import Tier


def record_local(span: Span, work: LocalWork, answer: LocalAnswer) -> None:
    """Record a span for each tier that worked on each choice, once the engine has reported it."""
    if not span.is_recording:
        return
    for ended in work.ended:
        if ended.stats is not None:
            for marks in _marks(ended, ended.stats, answer):
                record_engine(span, marks)


def _marks(ended: Ended, stats: RequestStats, answer: LocalAnswer) -> Iterator[EngineMarks]:
    works = {work.tier: work for work in stats.work if work.num_prompt_tokens}
    last = ended.tier or (answer.tier if answer.tier in works else None)
    for tier, work in works.items():
        is_last = tier == last or len(works) == 1
        is_first = len(works) == 1 or not is_last
        started_s = ended.arrival_s
        ended_s = ended.ended_s
        if not is_first and ended.switched_s is not None:
            started_s = ended.switched_s
        if not is_last and ended.switched_s is not None:
            ended_s = ended.switched_s
        # An engine that died has not reported; the gateway measured the same, a little later.
        queue_s = answer.queue_s if stats.queue_s is None else stats.queue_s
        ttft_s = answer.ttft_s if stats.ttft_s is None else stats.ttft_s
        yield EngineMarks(
            tier=tier,
            model=answer.models.get(tier, ""),
            started_s=started_s,
            ended_s=ended_s,
            scheduled_s=_moment(ended, queue_s if is_first else None),
            first_token_s=_moment(ended, ttft_s if is_last else None),
            num_prompt_tokens=work.num_prompt_tokens,
            num_cached_tokens=work.num_cached_tokens,
            num_computed_tokens=work.num_computed_tokens,
            num_output_tokens=work.num_output_tokens,
            num_steps=work.num_steps,
            num_drafted_tokens=work.num_drafted_tokens,
            num_accepted_tokens=work.num_accepted_tokens,
            num_draft_rows=_draft_rows(stats, but=tier),
            num_discarded_tokens=work.num_discarded_tokens,
            num_preemptions=work.num_preemptions,
            finish_reason=ended.reason if is_last and not ended.has_failed else None,
            error_type=ended.reason if is_last and ended.has_failed else None,
        )
    if not works:
        yield EngineMarks(
            tier=ended.tier or answer.first_tier,
            model=answer.models.get(ended.tier or answer.first_tier, ""),
            started_s=ended.arrival_s,
            ended_s=ended.ended_s,
            finish_reason=None if ended.has_failed else ended.reason,
            error_type=ended.reason if ended.has_failed else None,
        )


def _moment(ended: Ended, after_s: float | None) -> float | None:
    return None if after_s is None else ended.arrival_s + after_s


def _draft_rows(stats: RequestStats, *, but: Tier) -> int:
    """Return the rows that the other tier computed to draft for this one."""
    return sum(work.num_draft_rows for work in stats.work if work.tier != but)
