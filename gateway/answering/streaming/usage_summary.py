"""Summarises a finished generation for the ledger."""

from typing import Final

from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.tenancy.ledger.row import RowOutcome
from outrider.gateway.tenancy.metering.rows import LocalAnswer

_OUTCOMES: Final[dict[str, RowOutcome]] = {
    "stop": "answered",
    "error": "failed",
    "handed_over": "escalated",
    "abort": "cancelled",
}


def usage_summary(generation: Generation, origin: RouteReason) -> LocalAnswer:
    """Summarise it, with the cost and the tokens that are shown to its client."""
    job = generation.job
    used, is_degraded = generation.usage, generation.is_degraded
    outcome = _OUTCOMES[generation.outcome]
    if outcome == "answered" and generation.is_cut_by_limit:
        outcome = "limited"
    models = {job.tier: job.model_id}
    if job.escalation is not None:
        models[job.escalation.tier] = job.escalation.model_id
    return LocalAnswer(
        tier=generation.tier,
        first_tier=job.tier,
        outcome=outcome,
        models=models,
        num_prompt=job.num_prompt_tokens,
        num_cached=min(used.num_cached_tokens, job.num_prompt_tokens),
        written=generation.written,
        tokens_by_choice=tuple([choice.usage.num_tokens for choice in generation.choices]),
        num_reasoning=used.num_reasoning_tokens,
        num_held=generation.num_held_tokens,
        was_probed=job.watch is not None and job.watch.wants_hidden_state,
        was_given_up=generation.outcome == "handed_over",
        is_continuation=origin.continues is not None,
        is_bounded=job.is_bounded,
        is_degraded=is_degraded or origin.is_degraded,
        hand_off=origin.hand_off or "",
        failure=generation.failure,
        queue_s=used.queue_s,
        ttft_s=generation.ttft_s(),
        duration_s=generation.duration_s(),
    )
