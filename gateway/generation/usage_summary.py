"""Summarises a finished generation for the ledger."""

from typing import Final

from gateway.answers.responder import RouteReason
from gateway.generation.generation import Generation
from gateway.ledger.row import RowOutcome
from gateway.metering.rows import LocalAnswer

_OUTCOMES: Final[dict[str, RowOutcome]] = {
    "stop": "answered",
    "error": "failed",
    "handed_over": "escalated",
    "abort": "cancelled",
}


def usage_summary(generation: Generation, origin: RouteReason) -> LocalAnswer:
    """Summarise it, with the cost and the tokens that are shown to its client."""
    job = generation.job
    used = [choice.usage for choice in generation.choices]
    outcome = _OUTCOMES[generation.outcome]
    if outcome == "answered" and generation.is_cut_by_limit:
        outcome = "limited"
    queued = [usage.queue_s for usage in used if usage.queue_s is not None]
    models = {job.tier: job.model_id}
    if job.escalation is not None:
        models[job.escalation.tier] = job.escalation.model_id
    return LocalAnswer(
        tier=generation.tier,
        first_tier=job.tier,
        outcome=outcome,
        models=models,
        num_prompt=job.num_prompt_tokens,
        num_cached=min(sum(usage.num_cached_tokens for usage in used), job.num_prompt_tokens),
        written=generation.written,
        tokens_by_choice=tuple(usage.num_tokens for usage in used),
        num_reasoning=sum(usage.num_reasoning_tokens for usage in used),
        num_held=sum(cascade.num_held_tokens for cascade in generation.cascades),
        was_probed=job.cascade is not None and job.cascade.wants_hidden_state,
        was_given_up=generation.outcome == "handed_over",
        is_continuation=origin.continues is not None,
        is_bounded=job.is_bounded,
        is_degraded=generation.is_degraded or origin.is_degraded,
        hand_off=origin.hand_off or "",
        failure=generation.failure,
        queue_s=max(queued, default=None),
        ttft_s=generation.ttft_s(),
        duration_s=generation.duration_s(),
    )
