"""A routing decision in the format of POST /v1/route (gateway/contract/schema/routing.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.engine.events import TierInfo
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.jobs.tier_choice import TierChoice
from outrider.verifier.params import Tier


def describe_route(
    model: str,
    candidates: Sequence[TierInfo],
    choice: TierChoice,
    job: Job,
    costs_usd: Mapping[Tier, float],
    parts: RoutingParts,
) -> dict[str, Any]:
    """Return `RouteReport` as JSON: why the job of a request for `model` is as it is."""
    route, plan = choice.route, job.cascade
    cascade = plan and {
        "hold_back_tokens": parts.cascade.hold_back_tokens,
        "hold_back_ms": plan.hold_back_s and 1000 * plan.hold_back_s,
        "judges_whole": plan.hold_back_s is None,
        "mid_stream": plan.mid_stream,
    }
    return {
        "object": "route",
        "model": model,
        "tier": choice.tier,
        "model_id": choice.info.model_id,
        "reason": choice.reason,
        "quality": route and route.quality,
        "threshold": route and route.threshold,
        "band": route and route.band,
        "stage": route and route.stage,
        "cascade": cascade,
        "prompt_tokens": job.num_prompt_tokens,
        "cost_usd": _rounded(costs_usd.get(choice.tier)),
        "sticky": choice.sticky,
        "pair": parts.pair,
        "alternatives": [
            {
                "tier": info.tier,
                "model_id": info.model_id,
                "cost_usd": _rounded(costs_usd.get(info.tier)),
            }
            for info in candidates
            if info.tier != choice.tier
        ],
    }


def _rounded(cost_usd: float | None) -> float | None:
    """Round to six digits: sums of floats have long tails."""
    return None if cost_usd is None else float(f"{cost_usd:.6g}")
