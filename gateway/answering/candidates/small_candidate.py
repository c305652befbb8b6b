"""The small model's server as a candidate: routed as a local small model is, and watched."""

from dataclasses import replace
from typing import ClassVar

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.failures import after_failure, with_reason
from outrider.gateway.answering.candidates.fallback import unbounded
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCandidate
from outrider.gateway.answering.candidates.watched_responder import SmallWatch
from outrider.gateway.answering.jobs.preferences import between_outlooks, hand_off_kind
from outrider.gateway.answering.jobs.route_report import watch_report
from outrider.gateway.answering.jobs.tier_choice import requested_constraints
from outrider.gateway.answering.reading.judged_text import goes_on_with_tools, judged_text
from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.contract.answers.responder import (
    Place,
    Responder,
    RouteReason,
    StrongTier,
    TryNextPlace,
)
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    GatewayError,
    UpstreamRefusalError,
)
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.router.guard import GuardOutcome
from outrider.router.policy import Preference, Route, RouteConstraintError, RoutePolicy


class SmallServerCandidate(UpstreamCandidate, frozen=True, kw_only=True):
    """The small model's server, which may answer one request."""

    place: ClassVar[Place] = "small_upstream"
    label: ClassVar[str] = "small model's server"
    router: RoutePolicy
    strong_tier: StrongTier | None
    """Gets what is too hard."""

    async def open(self, origin: RouteReason) -> Responder:
        """Make a responder, not yet begun.

        Raises TryNextPlace where the prompt alone says that it is too hard, and BadRequestError for
        a request whose constraints cannot be judged.
        """
        if origin.continues is not None or self.strong_tier is None:
            reason = origin.reason or self.parsed.constraints.reason
            return await super().open(replace(origin, reason=reason))
        preference = self._preference(self.strong_tier)
        route = self._route(self.strong_tier, preference)
        self._note(route)
        if route.tier != "small":
            raise TryNextPlace(self._hand_off(route, preference), is_own=route.is_own)
        origin = replace(origin, reason=origin.explain(route.reason), quality=route.quality)
        watch = await self._watch(route, self.strong_tier)
        return await self.calls.responder(self.parsed, self.query, origin, watch=watch)

    async def route_report(self, origin: RouteReason) -> RouteReport:
        """Return the report of a request that it begins; nothing is counted.

        Raises TryNextPlace as `open` does.
        """
        if self.strong_tier is None:
            return await super().route_report(RouteReason())
        preference = self._preference(self.strong_tier)
        route = self._route(self.strong_tier, preference)
        if route.tier != "small":
            raise TryNextPlace(self._hand_off(route, preference))
        origin = RouteReason(reason=route.reason, quality=route.quality)
        plan = route.watch
        hold_back_tokens = 0 if plan is None else plan.hold_back_tokens
        watch = watch_report(plan, hold_back_tokens=hold_back_tokens, mid_stream=False)
        return self.calls.route_report(self.parsed, self.query, origin, route, watch)

    def _preference(self, strong_tier: StrongTier) -> Preference | None:
        parsed = self.parsed
        by_key = parsed.context.principal.scopes.prefer
        by = parsed.options.preferred(by_key, self.calls.routing.prefer)
        return by and between_outlooks(by, self.outlook(), strong_tier.outlook())

    def _route(self, strong_tier: StrongTier, preference: Preference | None) -> Route:
        parsed = self.parsed
        if goes_on_with_tools(parsed.document):
            reason = f"tool loop: {strong_tier.tier}, the tier that made the calls is unknown"
            return Route(tier="large", reason=reason)
        constraints = replace(
            requested_constraints(parsed.options),
            preference=preference,
            is_whole=not parsed.is_streamed,
            may_watch=_has_one_answer(parsed),
        )
        try:
            return self.router.route(judged_text(parsed.document), constraints)
        except RouteConstraintError as error:
            raise BadRequestError(
                f"outrider.min_quality: {error}.", param="outrider.min_quality"
            ) from None

    async def _watch(self, route: Route, strong_tier: StrongTier) -> SmallWatch | None:
        small = self.calls.upstreams.small
        assert small is not None, "a request for it has come"
        if route.watch is None:
            return None
        return SmallWatch(
            plan=route.watch,
            quality=route.quality,
            strong_tier=strong_tier,
            tells_logprobs=await small.until_known(),
            metrics=self.calls.metrics,
            clock=self.calls.clock,
            on_untrusted=small.distrust,
        )

    def _note(self, route: Route) -> None:
        """Report to the router's guard; a watched answer is reported by its watch."""
        guard = self.calls.routing.guard
        if guard and route.is_own and not route.watch and route.quality is not None:
            guard.saw(GuardOutcome(quality=route.quality, is_strong=route.tier == "large"))

    def _hand_off(self, route: Route, preference: Preference | None) -> RouteReason:
        return RouteReason(
            hand_off=hand_off_kind(preference),
            reason=route.reason,
            route_tier=self.query.tier,
            quality=route.quality,
        )

    def may_try_next(self, error: GatewayError | EngineError) -> bool:
        """Return whether another may answer: a larger tier may take what this server refuses."""
        return isinstance(error, UpstreamRefusalError) or super().may_try_next(error)

    def after(self, origin: RouteReason, error: Exception) -> RouteReason:
        """Return why the next candidate is tried after this error."""
        if isinstance(error, UpstreamRefusalError):
            return with_reason(origin, "capability", f"the {self.label} refuses it")
        return after_failure(origin, self.label, error)

    def by_itself(self) -> "SmallServerCandidate":
        """Return the server for all that it is sent, for when those behind it have failed."""
        return msgspec.structs.replace(self, strong_tier=None, start_timeout=unbounded)


def _has_one_answer(parsed: ParsedRequest) -> bool:
    """Return whether one answer is wanted, which can be held back as a whole."""
    prompt, best_of = parsed.document.get("prompt"), parsed.document.get("best_of")
    is_one_prompt = not (isinstance(prompt, list) and len(prompt) > 1)
    return parsed.num_choices == 1 and best_of in (None, 1) and is_one_prompt
