"""What a request prefers, and which of two tiers it means: the first to answer, or the cheaper."""

from collections.abc import Mapping

from outrider.engine.events import TierInfo
from outrider.gateway.contract.answers.responder import HandOffKind, TierOutlook
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import Prefer
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.router.costs import ConversationSize, TokenPrices
from outrider.router.policy import Preference
from outrider.verifier.params import Tier


def preferred_by(
    options: OutriderOptions, principal: Principal, usual: Prefer | None
) -> Prefer | None:
    """Return what counts first: by the request, else by its key, else as `usual`.

    An alias's word is among the request's options, and an arm's where the request has none. None
    where nothing says it, or the request sets the threshold itself.
    """
    if options.threshold is not None:
        return None
    return options.prefer or principal.scopes.prefer or usual


def between_outlooks(by: Prefer, small: TierOutlook, large: TierOutlook) -> Preference:
    """Compare two tiers by what is known of them; what is unknown speaks for the small one."""
    if by == "quality":
        return Preference(by=by)
    if by == "price":
        is_cheaper = large.cost_usd is not None and large.cost_usd < (small.cost_usd or 0.0)
        return Preference(by=by, best="large" if is_cheaper else "small")
    small_s, large_s = small.first_token_s, large.first_token_s
    if not small_s or not large_s:
        return Preference(by=by)
    return Preference(
        by=by,
        best="large" if large_s < small_s else "small",
        figures=f" (small {small_s:.2f} s, large {large_s:.2f} s)",
    )


def between_models(
    by: Prefer,
    tiers: Mapping[Tier, TierInfo],
    size: ConversationSize,
    cached_on: Tier | None,
    prices: Mapping[Tier, TokenPrices],
) -> Preference:
    """Compare the two models of one engine, which wait in one queue.

    The first token comes after a pass over what the model does not have in its cache.
    """
    if by == "quality":
        return Preference(by=by)

    def cached(tier: Tier) -> float:
        return size.num_cached_tokens if tier == cached_on else 0.0

    def work(tier: Tier) -> float:
        return tiers[tier].num_parameters * (size.num_prompt_tokens - cached(tier))

    def cost_usd(tier: Tier) -> float:
        return prices[tier].cost_usd(
            num_prompt_tokens=size.num_prompt_tokens,
            num_completion_tokens=size.num_completion_tokens,
            num_cached_tokens=cached(tier),
        )

    measure = cost_usd if by == "price" else work
    return Preference(by=by, best="large" if measure("large") < measure("small") else "small")


def hand_off_kind(preference: Preference | None) -> HandOffKind:
    """Return why the large tier gets a request that the small one might have answered."""
    return "policy" if preference is not None and preference.best == "large" else "quality"
