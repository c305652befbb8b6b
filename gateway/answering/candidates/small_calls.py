"""Requests for the small model's server: routed as for a local small model, and watched."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from outrider.gateway.answering.candidates.cloud_calls import CloudCalls
from outrider.gateway.answering.candidates.watched_responder import SmallWatch
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.route_report import cascade_report
from outrider.gateway.answering.jobs.tier_choice import requested_constraints
from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.answering.streaming.second_look import shared_tokens
from outrider.gateway.contract.answers.responder import (
    DraftAnswer,
    HandOffError,
    Responder,
    RouteReason,
    UpstreamEscalation,
)
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.tenancy.metering.metrics import GatewayMetrics
from outrider.router.conversations import is_tool_loop
from outrider.router.guard import GuardOutcome, RouteGuard
from outrider.router.policy import Route, RouteConstraintError, RoutePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCalls:
    """Opens the small model's server. `guard`: the router's, where it has one."""

    calls: CloudCalls
    jobs: JobBuilder
    router: RoutePolicy
    guard: RouteGuard | None
    metrics: GatewayMetrics
    clock: Callable[[], float]

    async def responder(
        self, parsed: ParsedRequest, strong: UpstreamEscalation, origin: RouteReason
    ) -> Responder:
        """Make a responder, not yet begun.

        `strong` gets what is too hard: raises HandOffError where the prompt alone says so, and
        BadRequestError for a request whose constraints cannot be judged.
        """
        route = self._route(parsed, strong)
        self._note(route)
        if route.tier != "small":
            raise HandOffError(_origin(parsed, route), is_own=route.is_own)
        reason = replace(origin, reason=origin.explain(route.reason), quality=route.quality)
        watch = None if route.cascade is None else await self._watch(route, strong)
        return await self.calls.responder(parsed.for_small(), reason, watch=watch)

    def route_report(self, parsed: ParsedRequest, strong: UpstreamEscalation | None) -> RouteReport:
        """Return the report of a request that the server begins; nothing is counted.

        Raises HandOffError as `responder` does.
        """
        if strong is None:
            return self.calls.route_report(parsed.for_small(), RouteReason())
        route = self._route(parsed, strong)
        if route.tier != "small":
            raise HandOffError(_origin(parsed, route))
        origin = RouteReason(reason=route.reason, quality=route.quality)
        plan = route.cascade
        hold_back_tokens = 0 if plan is None else plan.hold_back_tokens
        cascade = cascade_report(plan, hold_back_tokens=hold_back_tokens, mid_stream=False)
        return self.calls.route_report(parsed.for_small(), origin, route, cascade)

    def local_opinion(self, parsed: ParsedRequest, kept: DraftAnswer) -> None:
        """Have the large model of this process judge an answer that is kept."""
        request, context = parsed.request, msgspec.structs.replace(parsed.context, meter=None)
        assert request is not None, "a request for the local models was read as one"

        async def look() -> None:
            job = await self.jobs.job(request, context)
            token_ids = await job.tokenizer.encode_answer(kept.text, 2 * kept.num_tokens)
            share = None
            if token_ids:
                share = await shared_tokens(
                    self.jobs.models.engine, job.choices[0].request, token_ids
                )
            if share is not None:
                kept.agrees(share)

        self.jobs.routing.second_looks.offer(look)

    def _route(self, parsed: ParsedRequest, strong: UpstreamEscalation) -> Route:
        messages = parsed.document.get("messages")
        if isinstance(messages, list) and _is_tool_loop(messages):
            reason = f"tool loop: {strong.name}, the tier that made the calls is unknown"
            return Route(tier="large", reason=reason)
        constraints = replace(
            requested_constraints(parsed.options),
            is_whole=not parsed.is_streamed,
            may_watch=parsed.has_one_answer,
        )
        try:
            return self.router.route(parsed.text, constraints)
        except RouteConstraintError as error:
            raise BadRequestError(
                f"outrider.min_quality: {error}.", param="outrider.min_quality"
            ) from None

    async def _watch(self, route: Route, strong: UpstreamEscalation) -> SmallWatch:
        small = self.calls.cloud.small
        assert small is not None, "a request for it has come"
        assert route.cascade is not None, "it is watched"
        return SmallWatch(
            plan=route.cascade,
            quality=route.quality,
            take_over=strong.take_over,
            second_opinion=strong.second_opinion,
            tells_logprobs=await small.until_known(),
            metrics=self.metrics,
            clock=self.clock,
            on_untrusted=small.distrust,
        )

    def _note(self, route: Route) -> None:
        """Tell the router's guard; a watched answer is reported by its watch."""
        if self.guard and route.is_own and not route.cascade and route.quality is not None:
            is_strong = route.tier == "large"
            self.guard.saw(GuardOutcome(quality=route.quality, is_strong=is_strong))


def _origin(parsed: ParsedRequest, route: Route) -> RouteReason:
    return RouteReason(
        hand_off="quality",
        reason=route.reason,
        route_tier=parsed.constraints.small,
        quality=route.quality,
    )


def _is_tool_loop(messages: list[Any]) -> bool:
    return is_tool_loop(
        (str(message.get("role")), bool(message.get("tool_calls")))
        for message in messages
        if isinstance(message, dict)
    )
