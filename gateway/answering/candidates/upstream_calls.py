"""Upstream tiers as candidates: the body that is sent, the most it may cost, the responder."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Final

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.failures import after_failure, is_passing
from outrider.gateway.answering.candidates.fallback import StartTimeout
from outrider.gateway.answering.candidates.upstream_responder import UpstreamResponder
from outrider.gateway.answering.candidates.watched_responder import SmallWatch, WatchedResponder
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.documents import beginning, num_answers
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.parsed_request import ParsedRequest, UpstreamQuery
from outrider.gateway.answering.reading.tier_checks import TierChecks
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.answers.responder import (
    DraftAnswer,
    Place,
    Responder,
    RouteReason,
    StrongAnswer,
    TierOutlook,
)
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BudgetError,
    GatewayError,
    RateLimitError,
    UnavailableError,
)
from outrider.gateway.contract.schema.routing import RouteReport, WatchReport
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.reserved_usage import UsageEstimate
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.gateway.upstream.bounds import most_predicted_tokens
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.mirror import MirroredAnswer
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.router.label_free import text_agreement
from outrider.router.policy import Route

# If no tier answers instead, the held text must still be sent and the answer written to its end.
_SHARE_FOR_OTHERS: Final = 0.7
_LOOK_FACTOR: Final = 2
"""The tokens of a second opinion for each one of the answer: it may put the same otherwise."""
_LONG_ANSWER: Final = 4096
"""The tokens reserved, if there is room, for a whole answer whose length is unknown."""
_LONGEST_ANSWER: Final = 131_072
"""The bound on an answer's tokens where a server's context is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCalls:
    """Makes upstream calls and their responders."""

    upstreams: UpstreamParts
    names: LiveModelCatalog
    checks: TierChecks
    routing: RoutingParts
    metrics: GatewayMetrics
    local_tiers: Collection[str]
    """Those with a tokenizer."""
    clock: Callable[[], float]

    async def responder(
        self,
        parsed: ParsedRequest,
        query: UpstreamQuery,
        origin: RouteReason,
        prediction: str = "",
        *,
        watch: SmallWatch | None = None,
        weak: DraftAnswer | None = None,
    ) -> UpstreamResponder:
        """Make a responder, not yet begun. Raises UnavailableError if no model is known.

        `watch`: the answer is the small model's, and is judged. `weak`: the one that it replaces.
        """
        tier = self.checks.tier(query)
        if origin.continues is not None:
            if tier.traits.continuation == "none":
                raise UnavailableError(f"The {tier.name} tier cannot go on behind others' text.")
            rest = parsed.rest_after(origin.continues)
            parsed = msgspec.structs.replace(parsed, outward=rest)
        model = query.model or await self._usual_model(tier)
        meter = parsed.context.meter
        document, allowance = await self._paid(parsed, query)
        if meter is not None and origin.continues is not None:
            meter.continued()
        call = UpstreamCall(
            endpoint=parsed.endpoint,
            document=tier.fields.outgoing(document, cache_salt=parsed.context.principal.cache_salt),
            model=model,
            request_id=parsed.context.request_id,
            arrival_s=parsed.context.arrival_s,
            hops=(*parsed.context.hops, self.upstreams.gateway_id),
            deadline_s=parsed.constraints.deadline_s,
            affinity=self._affinity(parsed, tier),
            prediction=prediction,
            on_attempt=None if meter is None else meter.on_attempt,
            span=parsed.context.span,
            wants_logprobs=watch is not None and watch.tells_logprobs,
        )
        make = UpstreamResponder if watch is None else partial(WatchedResponder, watch=watch)
        responder = make(
            tier,
            call,
            origin,
            secrets=self.upstreams.secrets,
            on_answered=partial(self._answered, parsed, weak),
            is_continuable=parsed.continues_elsewhere(self.upstreams.rules),
            falls_back_on=parsed.falls_back_on,
            allowance=allowance,
            is_bounded=parsed.token_limit is not None,
        )
        responder.arm = parsed.context.arm
        if parsed.options.receipt:
            responder.no_receipt = "an upstream server answered"
        return responder

    async def _usual_model(self, tier: UpstreamTier) -> str:
        model = await self.names.usual_model(tier.name)
        if model is None:
            raise UnavailableError(
                f"The {tier.name} tier has not told which models it has (it may be down), and "
                f"none is set; its operator sets tiers.{tier.name}.model."
            )
        return model

    async def _paid(
        self, parsed: ParsedRequest, query: UpstreamQuery
    ) -> tuple[Mapping[str, Any], TokenAllowance | None]:
        """Return the document, with no more tokens than the tenant may use, and what it may use.

        Raises RateLimitError or BudgetError.
        """
        document, allowance, meter = parsed.document, None, parsed.context.meter
        affordable = self.checks.affordable(parsed, query)
        if affordable is not None:
            document = {**document, "max_completion_tokens": affordable}
        if meter is not None:
            allowance = await self._admitted(meter, parsed, query)
            if allowance is not None and not parsed.is_streamed and parsed.token_limit is None:
                document = await _bounded(parsed, allowance, affordable)
        return document, allowance

    async def _admitted(
        self, meter: RequestMeter, parsed: ParsedRequest, query: UpstreamQuery
    ) -> TokenAllowance | None:
        """Reserve tokens for the answer; return those left to the tenant, None without limits.

        Raises RateLimitError or BudgetError.
        """
        if not meter.principal.is_limited:
            return None
        tier = self.checks.tier(query)
        local = () if parsed.local is None else self.local_tiers
        allowed = [name for name in local if meter.principal.scopes.allows_tier(name)]
        return await meter.admit(
            UsageEstimate(
                tiers=(tier.name, *allowed),
                num_prompt_tokens=self.checks.num_prompt_tokens(parsed, query),
                num_choices=num_answers(parsed),
                num_predicted_tokens=most_predicted_tokens(parsed.document),
                # The default for the local models is not sent, and binds no other server.
                max_tokens=parsed.most_tokens(tier.settings.max_context or _LONGEST_ANSWER),
                is_bounded=parsed.token_limit is not None,
                is_enforced_upstream=True,
            )
        )

    async def strong_answer(
        self,
        place: Place,
        parsed: ParsedRequest,
        weak: DraftAnswer,
        open_: Callable[[], Awaitable[Responder]],
    ) -> StrongAnswer | None:
        """Have a place's responder answer instead of a weak answer.

        None if it failed, or did not begin in the time that a deadline leaves.
        """
        deadline_s = parsed.constraints.deadline_s
        timeout_s = None
        if deadline_s is not None:
            left_s = max(deadline_s - self.clock(), 0.0)
            timeout_s = _SHARE_FOR_OTHERS * left_s
        parts = None
        try:
            async with asyncio.timeout(timeout_s):
                responder = await open_()
                parts = responder.parts()
                first = await anext(parts)
        except (GatewayError, EngineError, TimeoutError):
            if parts is not None:
                await parts.aclose()
            self.upstreams.metrics.degraded()
            return None
        except BaseException:
            if parts is not None:
                await parts.aclose()
            raise
        self.count_origin(weak.origin, responder.facts.tier)
        return StrongAnswer(place, responder, parts, first)

    def count_origin(self, origin: RouteReason, tier: str) -> None:
        """Count why an answer has begun on this tier."""
        if origin.hand_off is not None:
            self.upstreams.metrics.handed_off(origin.hand_off, origin.route_tier or "auto", tier)
        if origin.is_degraded:
            self.upstreams.metrics.degraded()

    def mirror(self, parsed: ParsedRequest, answer: MirroredAnswer) -> None:
        """Offer a request and its answer for a second opinion."""
        mirror = self.upstreams.mirror
        if mirror is None or parsed.constraints.is_private:
            return
        if not parsed.context.principal.scopes.allows_tier(mirror.tier):
            return  # requests that may not be answered there are not mirrored there either
        try:
            call = self.copy(parsed, self.upstreams.tiers[mirror.tier], parsed.document, "")
        except BadRequestError:
            return  # the copy would differ from the request
        context = parsed.context
        end_user = "" if context.meter is None else context.meter.end_user
        key_id = context.principal.key_id
        mirror.offer(call, replace(answer, key_id=key_id, end_user=end_user))

    def copy(
        self, parsed: ParsedRequest, tier: UpstreamTier, document: Mapping[str, Any], model: str
    ) -> UpstreamCall:
        """Return a call whose answer no client waits for. Raises BadRequestError."""
        return UpstreamCall(
            endpoint=parsed.endpoint,
            document=tier.fields.outgoing(document, cache_salt=parsed.context.principal.cache_salt),
            model=model,
            request_id=parsed.context.request_id,
            arrival_s=self.clock(),
            hops=(*parsed.context.hops, self.upstreams.gateway_id),
            on_attempt=None if parsed.context.meter is None else parsed.context.meter.on_attempt,
        )

    def _answered(
        self, parsed: ParsedRequest, weak: DraftAnswer | None, responder: UpstreamResponder
    ) -> None:
        facts = responder.facts
        if weak is not None and responder.texts:
            weak.agrees(text_agreement(weak.text, responder.texts[0]))
        self.metrics.routed(facts.tier, facts.reason)
        answer = MirroredAnswer(
            tier=facts.tier,
            texts=responder.texts,
            duration_s=self.clock() - parsed.context.arrival_s,
            num_completion_tokens=facts.num_tokens,
            is_private=parsed.constraints.is_private,
        )
        self.mirror(parsed, answer)

    def route_report(
        self,
        parsed: ParsedRequest,
        query: UpstreamQuery,
        origin: RouteReason,
        route: Route | None = None,
        cascade: WatchReport | None = None,
    ) -> RouteReport:
        """Return the report of a request that an upstream tier answers."""
        if route is None:
            route = Route(
                tier="large",
                reason="",
                quality=origin.quality,
                stage=None if origin.quality is None else "text",
            )
        return RouteReport(
            object="route",
            model=query.resolved.name,
            tier=query.tier,
            model_id=query.model,
            reason=origin.explain("") or "requested",
            quality=route.quality,
            threshold=route.threshold,
            band=route.band,
            small_right=route.small_right,
            stage=route.stage,
            cascade=cascade,
            prompt_tokens=None,
            cost_usd=self.checks.cost_usd(parsed, query),
            sticky=None,
            pair=self.routing.pair,
            alternatives=[],
        )

    def _affinity(self, parsed: ParsedRequest, tier: UpstreamTier) -> str:
        """A key, equal for requests that begin alike: a conversation's turns, one system prompt."""
        if not tier.traits.has_prefix_cache or len(tier.settings.url) < 2:
            return ""
        return blake2b(beginning(parsed.document), digest_size=16).hexdigest()


class UpstreamCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An upstream tier that may answer one request."""

    place: ClassVar[Place] = "upstream"
    label: ClassVar[str] = "upstream tier"
    calls: UpstreamCalls
    parsed: ParsedRequest
    query: UpstreamQuery
    start_timeout: StartTimeout

    @property
    def tier(self) -> str:
        """The tier's name."""
        return self.query.tier

    @property
    def ignored_fields(self) -> Sequence[str]:
        """The client's fields that the server does not get."""
        ignored = self.calls.checks.tier(self.query).fields.ignored(self.parsed.document)
        return (*self.parsed.context.ignored_fields, *ignored)

    def expected_s(self) -> float | None:
        """Return the seconds of an answer; None while nothing was measured."""
        total = self.calls.checks.tier(self.query).total
        return total.quantile(0.95) or total.ewma_s

    def outlook(self) -> TierOutlook:
        """Return what may be expected of the tier for this request."""
        tier = self.calls.checks.tier(self.query)
        cost_usd = self.calls.checks.cost_usd(self.parsed, self.query)
        if cost_usd is None and tier.settings.has_price:
            cost_usd = 0.0
        first_token_s = tier.first_token.quantile(0.5) or tier.first_token.ewma_s
        return TierOutlook(first_token_s=first_token_s, cost_usd=cost_usd)

    async def open(self, origin: RouteReason) -> Responder:
        """Make a responder, not yet begun. Raises GatewayError."""
        return await self.calls.responder(self.parsed, self.query, origin)

    async def route_report(self, origin: RouteReason) -> RouteReport:
        """Return the report of a request that it answers."""
        return self.calls.route_report(self.parsed, self.query, origin)

    async def escalate(self, weak: DraftAnswer) -> StrongAnswer | None:
        """Answer in the place of a weak answer, which the server may take as a prediction."""
        opened = partial(
            self.calls.responder, self.parsed, self.query, weak.origin, weak.text, weak=weak
        )
        return await self.calls.strong_answer(self.place, self.parsed, weak, opened)

    def second_opinion(self, kept: DraftAnswer) -> None:
        """Write the beginning of an answer that is kept, and compare."""
        parsed, tier = self.parsed, self.calls.checks.tier(self.query)
        num_tokens = _LOOK_FACTOR * kept.num_tokens

        async def look() -> None:
            document = {**parsed.document, "stream": False, "max_completion_tokens": num_tokens}
            document.pop("stream_options", None)
            answer = tier.answer(
                self.calls.copy(parsed, tier, document, self.query.model or ""), kind="probe"
            )
            try:
                whole = await answer.whole()
            finally:
                await answer.aclose()
            kept.agrees(text_agreement(kept.text, whole.texts[0]))

        if not parsed.constraints.is_private:
            self.calls.routing.second_looks.offer(look)

    def may_try_next(self, error: GatewayError | EngineError) -> bool:
        """Return whether another may answer: ours take what this server's API cannot express."""
        if isinstance(error, RateLimitError | BudgetError):
            return error.tier is not None  # a limit of that tier alone
        return isinstance(error, BadRequestError) or is_passing(error)

    def after(self, origin: RouteReason, error: Exception) -> RouteReason:
        """Return why the next candidate is tried: without this one, the answer is degraded."""
        return replace(after_failure(origin, self.label, error), is_degraded=True)

    def by_itself(self) -> "UpstreamCandidate":
        """Return the same tier, which hands over to none."""
        return self


async def _bounded(
    parsed: ParsedRequest, allowance: TokenAllowance, at_most: int | None
) -> Mapping[str, Any]:
    """Bound a whole answer by the tenant's limits, as it cannot be ended part of the way."""
    count = num_answers(parsed)
    num_tokens = await allowance.stock_up(_LONG_ANSWER * count) // count
    if at_most is not None:
        num_tokens = min(num_tokens, at_most)
    # The dialect renames the field to the one that the server knows.
    return {**parsed.document, "max_completion_tokens": max(num_tokens, 1)}
