"""Chooses a request's tier by its model, the cost that it allows, and the router's decision."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from outrider.engine.errors import PromptTooLongError, TierUnavailableError
from outrider.engine.events import EngineInfo, TierInfo
from outrider.gateway.answering.jobs.preferences import (
    between_models,
    between_outlooks,
    hand_off_kind,
    likely_size,
    local_outlook,
)
from outrider.gateway.answering.jobs.prompts import Dialogue, Prompts
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.jobs.shared_bounds import bounded, cascade_tier
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.local_load import TierLoads
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.answers.responder import (
    RouteReason,
    StrongTier,
    TryNextPlace,
)
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import Prefer
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.router.costs import gain_factor, prices_by_size
from outrider.router.policy import Route, RouteConstraintError, RouteConstraints, RoutePolicy
from outrider.verifier.params import TIERS, Tier

CandidateTiers = Sequence[TierInfo]


class TierChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tier that a request goes to, and why."""

    info: TierInfo
    reason: str
    route: Route | None = None
    """The router's decision where it made one."""
    escalation: TierInfo | None = None
    """The tier that takes a weak answer over, if the route has a watch."""
    escalates_upstream: bool = False
    """An upstream tier takes a weak answer over."""
    sticky: Tier | None = None
    """The tier that has the conversation in its cache."""
    mixed_with: TierInfo | None = None
    """The small tier, where both models have a part in each token."""

    @property
    def tier(self) -> Tier:
        """The tier's name."""
        return self.info.tier


class _Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers that cannot cost more than `max_cost_usd`, and whether both may answer."""

    affordable: CandidateTiers
    may_escalate: bool = True
    costs: Mapping[Tier, float] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChooser:
    """Chooses a tier. Only `routing` keeps state between requests."""

    tokenizers: Mapping[Tier, ChatTokenizer]
    router: RoutePolicy
    routing: RoutingParts
    limits: GatewayLimits
    clock: Callable[[], float]
    loads: TierLoads
    first_token_s: Callable[[], float] = field(default=lambda: 0.0)
    """Returns the seconds until a request's first token is expected; 0 while none was measured."""
    on_routed: Callable[[float], object] = field(default=lambda held_s: None)
    """Gets the seconds for which a decision held the event loop."""

    async def choose(
        self,
        prompts: Prompts,
        candidates: CandidateTiers,
        strong_tier: StrongTier | None,
        engine: EngineInfo,
        principal: Principal = ANONYMOUS,
    ) -> TierChoice:
        """Choose the tier of a request.

        `candidates`: the tiers that its model means and its key allows. `strong_tier`: the upstream
        tier that plays the large model's part for this request. `principal`: its key. Raises
        BadRequestError, TierUnavailableError or PromptTooLongError, and TryNextPlace where the
        request is for the upstream tier.
        """
        candidates = _narrowed(prompts.options.tier, candidates, engine)
        is_routed = prompts.is_auto or len(candidates) > 1  # an adapter beside the small model
        if prompts.options.needs_both_models:
            param = "outrider.judge" if prompts.options.judge else "outrider.quality"
            info = cascade_tier(candidates, engine, param=param)
            await self._budget(prompts, (info,))
            is_named = prompts.options.tier is not None or not is_routed
            choice = self._choice(info, "requested" if is_named else "cascade")
            return msgspec.structs.replace(choice, mixed_with=engine.tiers["small"])
        if is_routed and prompts.options.tier is None:
            small = next((info for info in candidates if info.tier == "small"), None)
            by = prompts.options.preferred(principal.scopes.prefer, self.routing.prefer)
            if strong_tier is not None and small is not None:
                return await self._shared(prompts, small, strong_tier, by)
            return await self._routed(prompts, candidates, by)
        for name in ("min_quality", "threshold"):
            if getattr(prompts.options, name) is not None:
                raise BadRequestError(
                    f"outrider.{name}: the request names its model; the router chooses by quality "
                    "where the model is auto and no tier is set.",
                    param=f"outrider.{name}",
                )
        await self._budget(prompts, candidates)
        return self._choice(candidates[0], "requested")

    async def costs_usd(self, prompts: Prompts, infos: CandidateTiers) -> dict[Tier, float]:
        """Return the request's highest cost by tier; empty where no prices are set.

        Tiers for which it is too long are left out; if it is for all, raises PromptTooLongError.
        """
        prices = self.routing.prices
        if prices is None:
            return {}
        num_completion_tokens: float | None = prompts.request.token_limit
        if num_completion_tokens is None:
            typical = self.routing.typical.num_completion_tokens.value
            num_completion_tokens = self.limits.default_max_tokens or typical
        costs: dict[Tier, float] = {}
        for info in infos:
            try:
                rendered = await prompts.of(info)
            except PromptTooLongError:
                if info is infos[-1] and not costs:
                    raise
                continue
            costs[info.tier] = prices[info.tier].cost_usd(
                num_prompt_tokens=sum(len(prompt.token_ids) for prompt in rendered),
                num_completion_tokens=num_completion_tokens * prompts.num_choices * len(rendered),
            )
        return costs

    async def _budget(self, prompts: Prompts, candidates: CandidateTiers) -> _Budget:
        most = prompts.options.max_cost_usd
        if most is None:
            return _Budget(affordable=candidates)
        if self.routing.prices is None:
            raise BadRequestError(
                "outrider.max_cost_usd: this server knows no prices; its operator sets them in "
                "routing.prices.small and routing.prices.large.",
                param="outrider.max_cost_usd",
            )
        costs = await self.costs_usd(prompts, candidates)
        affordable = [info for info in candidates if costs.get(info.tier, most) <= most]
        if not affordable:
            raise _too_dear(min(costs.values()), most)
        return _Budget(affordable=affordable, may_escalate=sum(costs.values()) <= most, costs=costs)

    async def _routed(
        self, prompts: Prompts, candidates: CandidateTiers, by: Prefer | None
    ) -> TierChoice:
        budget = await self._budget(prompts, candidates)
        dialogue = prompts.dialogue
        sticky = None if dialogue is None else dialogue.tier
        if dialogue is not None and dialogue.is_tool_loop and len(candidates) > 1:
            return self._in_tool_loop(dialogue, prompts, candidates, budget)
        constraints = self._constraints(prompts, candidates, budget, by)
        tokenizer = self.tokenizers[candidates[0].tier]
        route = await self._route(prompts.text(tokenizer), constraints)
        if len(budget.affordable) < len(candidates):
            route = self._within(prompts, route, budget)
        fitted = await self._fitted(prompts, route, budget.affordable)
        return msgspec.structs.replace(fitted, sticky=sticky)

    async def _shared(
        self, prompts: Prompts, small: TierInfo, strong_tier: StrongTier, by: Prefer | None
    ) -> TierChoice:
        """Choose the small model where the router trusts it; else raise TryNextPlace."""
        await self._budget(prompts, (small,))
        dialogue = prompts.dialogue
        if dialogue is not None and dialogue.is_tool_loop:
            if dialogue.tier is not None:
                return self._in_tool_loop(dialogue, prompts, (small,), _Budget(affordable=(small,)))
            reason = f"tool loop: {strong_tier.tier}, the tier that made the calls is unknown"
            raise TryNextPlace(RouteReason(hand_off="quality", reason=reason, route_tier="small"))
        tokenizer = self.tokenizers[small.tier]
        preference = None
        if by is not None:
            small_outlook = local_outlook(
                "small", self.first_token_s(), self.routing.prices, self.routing.typical
            )
            preference = between_outlooks(by, small_outlook, strong_tier.outlook())
        constraints = replace(
            requested_constraints(prompts.options),
            preference=preference,
            is_whole=not prompts.request.stream,
            may_watch=prompts.num_choices == 1 and len(await prompts.of(small)) == 1,
        )
        route = await self._route(prompts.text(tokenizer), constraints)
        if route.tier != "small":
            origin = RouteReason(
                hand_off=hand_off_kind(preference),
                reason=route.reason,
                route_tier="small",
                quality=route.quality,
            )
            raise TryNextPlace(origin, is_own=route.is_own)
        choice = self._choice(small, route.reason, route)
        return msgspec.structs.replace(choice, escalates_upstream=route.watch is not None)

    async def _route(self, text: str, constraints: RouteConstraints) -> Route:
        """Return the router's decision, made in a turn of the event loop of its own.

        A decision takes some tenths of a millisecond, as reading the request before and building
        its prompt behind do. Raises BadRequestError for a wish that it cannot judge.
        """
        await asyncio.sleep(0)
        began_s = time.perf_counter()
        try:
            route = self.router.route(text, constraints)
        except RouteConstraintError as error:
            raise BadRequestError(
                f"outrider.min_quality: {error}.", param="outrider.min_quality"
            ) from None
        self.on_routed(time.perf_counter() - began_s)
        await asyncio.sleep(0)
        return route

    def _constraints(
        self,
        prompts: Prompts,
        candidates: CandidateTiers,
        budget: _Budget,
        by: Prefer | None,
    ) -> RouteConstraints:
        tiers = {info.tier: info for info in candidates}
        if set(tiers) != {"small", "large"}:
            return requested_constraints(prompts.options)
        is_alike = self.renders_alike
        constraints = replace(
            requested_constraints(prompts.options),
            is_whole=not prompts.request.stream,
            may_watch=budget.may_escalate and (is_alike or not prompts.has_token_ids),
            busy_factor=self.loads.busy_factor(
                self.routing.typical.likely_tokens(prompts.request.token_limit)
            ),
            max_tokens=prompts.request.token_limit,
        )
        dialogue = prompts.dialogue
        turn = None if dialogue is None else dialogue.cached_turn(self.clock())
        is_sticky = turn is not None and self.routing.is_sticky
        if not is_sticky and by is None:
            return constraints
        prices = self.routing.prices or prices_by_size(
            {tier: info.num_parameters for tier, info in tiers.items()}
        )
        size = likely_size(prompts, turn, self.routing.typical)
        if by is not None:
            cached_on = None if turn is None else turn.tier
            preference = between_models(by, tiers, size, cached_on, prices)
            constraints = replace(constraints, preference=preference)
        if turn is None or not is_sticky:
            return constraints
        factor = gain_factor(turn.tier, size, prices)
        return replace(constraints, current=turn.tier, gain_factor=factor)

    @property
    def renders_alike(self) -> bool:
        """True if all tiers write a request with the same tokens."""
        return len({t.rendering for t in self.tokenizers.values()}) == 1

    def _in_tool_loop(
        self, dialogue: Dialogue, prompts: Prompts, candidates: CandidateTiers, budget: _Budget
    ) -> TierChoice:
        """Continue on the tier that made the calls, which alone knows their purpose."""
        tier = dialogue.tier or "large"
        info = next((info for info in candidates if info.tier == tier), candidates[0])
        if info not in budget.affordable and prompts.options.max_cost_usd is not None:
            raise _too_dear(
                budget.costs[info.tier],
                prompts.options.max_cost_usd,
                f"on the {tier} tier, whose tool calls it answers,",
            )
        known = "made the calls" if dialogue.tier else "the tier that made the calls is unknown"
        choice = self._choice(info, f"tool loop: {tier}, {known}")
        return msgspec.structs.replace(choice, sticky=dialogue.tier)

    def _within(self, prompts: Prompts, route: Route, budget: _Budget) -> Route:
        """Restrict the route to the tiers that the request can pay."""
        (info,) = budget.affordable
        if prompts.options.min_quality and info.tier == "small":
            raise BadRequestError(
                "outrider.min_quality: outrider.max_cost_usd leaves only the small model, whose "
                "quality cannot be guaranteed.",
                param="outrider.min_quality",
            )
        if route.tier == info.tier:
            return replace(route, watch=None, is_own=False)
        other = budget.costs[route.tier]
        reason = f"max_cost_usd: {route.tier} could cost too much ({other:.3g} > "
        return Route(
            tier=info.tier,
            reason=f"{reason}{prompts.options.max_cost_usd:.3g} USD)",
            quality=route.quality,
        )

    async def _fitted(
        self, prompts: Prompts, route: Route, affordable: CandidateTiers
    ) -> TierChoice:
        """Choose the route's tier, unless the request is too long for it and fits the other one."""
        tiers = {info.tier: info for info in affordable}
        info = tiers.get(route.tier)
        if info is None and len(tiers) == 1:
            (info,) = affordable
            reason = f"only the {info.tier} model is loaded; {route.reason}"
            return self._choice(info, reason, replace(route, watch=None, is_own=False))
        if info is None:
            raise TierUnavailableError(
                f"The router chose the {route.tier} tier, which is not loaded."
            )
        other = next((info for info in affordable if info.tier != route.tier), None)
        if other is None:
            alone = "" if route.watch is None else ", not watched: no other tier may answer"
            return self._choice(info, route.reason + alone, replace(route, watch=None))
        if not await _fits(prompts, info) and await _fits(prompts, other):
            reason = f"router: too long for the {info.tier} model's context"
            moved = Route(tier=other.tier, reason=reason, quality=route.quality)
            return self._choice(other, reason, moved)
        if route.watch is None:
            return self._choice(info, route.reason, route)
        if not await _fits(prompts, other):
            reason = f"{route.reason}, unwatched as it is too long for the {other.tier} model"
            return self._choice(info, reason, replace(route, watch=None, is_own=False))
        if self.renders_alike:
            info = bounded(info, (info, other))
        return msgspec.structs.replace(self._choice(info, route.reason, route), escalation=other)

    def _choice(self, info: TierInfo, reason: str, route: Route | None = None) -> TierChoice:
        if info.tier not in self.tokenizers:
            raise TierUnavailableError(f"The {info.tier} tier has no tokenizer.")
        return TierChoice(info=info, reason=reason, route=route)


def requested_constraints(options: OutriderOptions) -> RouteConstraints:
    """The request's own constraints for its route. Raises BadRequestError."""
    if options.min_quality is not None and options.threshold is not None:
        raise BadRequestError(
            "outrider.threshold: min_quality chooses a threshold; set one of them.",
            param="outrider.threshold",
        )
    hold_back_ms = options.hold_back_ms
    return RouteConstraints(
        min_quality=options.min_quality,
        threshold=options.threshold,
        hold_back_tokens=options.hold_back_tokens,
        hold_back_s=None if hold_back_ms is None else hold_back_ms / 1000,
    )


def _narrowed(wanted: str | None, candidates: CandidateTiers, engine: EngineInfo) -> CandidateTiers:
    """The candidates of the tier that the options name. Raises BadRequestError for none."""
    if wanted is None:
        return candidates
    if wanted not in engine.tiers:
        available = ", ".join(tier for tier in TIERS if tier in engine.tiers)
        raise BadRequestError(
            f"outrider.tier: unknown tier {wanted!r}; available: {available}.",
            param="outrider.tier",
        )
    found = [info for info in candidates if info.tier == wanted]
    if not found:
        has = " or ".join(info.tier for info in candidates)
        raise BadRequestError(
            f"outrider.tier: {wanted} contradicts the model, which means the {has} tier.",
            param="outrider.tier",
        )
    return found


def _too_dear(least: float, most: float, where: str = "") -> BadRequestError:
    return BadRequestError(
        f"outrider.max_cost_usd: the request may cost {least:.3g} USD {where or 'at least'}"
        f"{' at least' if where else ''}, not {most:.3g}; a smaller max_tokens costs less.",
        param="outrider.max_cost_usd",
    )


async def _fits(prompts: Prompts, info: TierInfo) -> bool:
    """Return whether the prompts and the requested answers fit in a tier's context."""
    try:
        rendered = await prompts.of(info)
    except PromptTooLongError:
        return False
    longest = max((len(prompt.token_ids) for prompt in rendered), default=0)
    limit = prompts.request.token_limit
    if limit is None or (limit and prompts.options.fit_context):
        limit = max(prompts.request.min_tokens or 0, 1)
    return longest + limit <= info.max_context
