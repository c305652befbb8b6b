"""A routing decision as POST /v1/route reports it."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from outrider.engine.events import TierInfo
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.jobs.tier_choice import TierChoice
from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.contract.schema.routing import (
    ExpectedCost,
    ModelChance,
    RouteReport,
    TierOption,
    WatchReport,
)
from outrider.router.policy import Route
from outrider.router.watch import WatchPlan
from outrider.verifier.params import Tier

_UNROUTED: Final = Route(tier="large", reason="")  # where the router made no decision


def watch_report(
    plan: WatchPlan | None, *, hold_back_tokens: int, mid_stream: bool
) -> WatchReport | None:
    """Return what is held back of the small model's answer; None where it is not watched."""
    if plan is None:
        return None
    return WatchReport(
        hold_back_tokens=hold_back_tokens,
        hold_back_ms=plan.hold_back_s and 1000 * plan.hold_back_s,
        judges_whole=plan.hold_back_s is None,
        mid_stream=mid_stream,
    )


def describe_route(
    model: str,
    candidates: Sequence[TierInfo],
    choice: TierChoice,
    job: Job,
    costs_usd: Mapping[Tier, float],
    parts: RoutingParts,
) -> RouteReport:
    """Return why the job of a request for `model` is as it is."""
    route, plan = choice.route or _UNROUTED, job.watch
    return RouteReport(
        object="route",
        model=model,
        tier=choice.tier,
        model_id=choice.info.model_id,
        reason=choice.reason,
        quality=route.quality,
        threshold=route.threshold,
        band=route.band,
        small_right=route.small_right,
        stage=route.stage,
        cascade=watch_report(
            plan,
            hold_back_tokens=parts.watch.hold_back_tokens,
            mid_stream=plan is not None and plan.mid_stream,
        ),
        prompt_tokens=job.num_prompt_tokens,
        cost_usd=_rounded(costs_usd.get(choice.tier)),
        sticky=choice.sticky,
        pair=parts.pair,
        alternatives=[
            TierOption(
                tier=info.tier,
                model_id=info.model_id,
                cost_usd=_rounded(costs_usd.get(info.tier)),
            )
            for info in candidates
            if info.tier != choice.tier
        ],
        costs=_expected(route),
    )


def routed_report(report: RouteReport, parsed: ParsedRequest) -> RouteReport:
    """Return the report of a request whose alias has a router, which chose among its models."""
    route = parsed.route
    if route is None:
        return report
    chances = [
        ModelChance(model=model, right=_rounded(chance) or 0.0)
        for model, chance in route.chances.items()
    ]
    return msgspec.structs.replace(
        report,
        reason=parsed.chain_reason.reason,
        quality=route.quality,
        threshold=route.threshold,
        stage=None if route.quality is None else "text",
        chances=chances or None,
    )


def _expected(route: Route) -> list[ExpectedCost] | None:
    found = [
        ExpectedCost(
            unit=unit,
            small=float(f"{costs.small:.6g}"),
            cascade=float(f"{costs.cascade:.6g}"),
            large=float(f"{costs.large:.6g}"),
        )
        for unit, costs in route.expected.items()
    ]
    return found or None


def _rounded(cost_usd: float | None) -> float | None:
    """Round to six digits: sums of floats have long tails."""
    return None if cost_usd is None else float(f"{cost_usd:.6g}")
