"""Writes the `usage` and `outrider` objects of an answer."""

from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.streaming.receipt_draft import ReceiptDraft
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.contract.schema.responses import (
    CachedTokens,
    CompletionTokensDetails,
    OutriderReport,
    PromptTokensDetails,
    Usage,
)


def rounded(number: float | None) -> float | None:
    """Round to six digits."""
    return None if number is None else round(number, 6)


def outrider_report(
    generation: Generation, origin: RouteReason, receipt: ReceiptDraft | None = None
) -> OutriderReport:
    """Return the `outrider` object."""
    job, used = generation.job, generation.usage
    mean = round(used.num_tokens / used.num_steps, 4) if used.num_steps else 0.0
    is_degraded = generation.is_degraded
    num_cached = min(used.num_cached_tokens, job.num_prompt_tokens)
    num_restored = min(used.num_restored_tokens, num_cached)
    num_pulled = min(used.num_pulled_tokens, num_cached - num_restored)
    report = OutriderReport(
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
        cached_tokens_by_level=CachedTokens(
            device=num_cached - num_restored - num_pulled, disk=num_restored, peer=num_pulled
        ),
        ttft_s=rounded(generation.ttft_s()),
        queue_s=rounded(used.queue_s),
        seed=job.seed,
        hand_off=origin.hand_off or ("failure" if is_degraded else None),
        degraded=origin.is_degraded or is_degraded,
        arm=job.arm or None,
    )
    if receipt is not None:
        receipt.put_into(report, generation, origin)
    return report


def usage_report(generation: Generation) -> Usage:
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
