"""What a request prefers, and which of two tiers it means: the first to answer, or the cheaper."""

from collections.abc import Mapping
from typing import Final

from outrider.engine.events import TierInfo
from outrider.gateway.answering.jobs.prompts import Prompts
from outrider.gateway.contract.answers.responder import HandOffKind, TierOutlook
from outrider.gateway.contract.schema.kinds import Prefer
from outrider.router.conversations import Turn
from outrider.router.costs import ConversationSize, TokenPrices, TypicalRequest
from outrider.router.policy import Preference
from outrider.verifier.params import Tier

_CHARS_PER_TOKEN: Final = 4.0


def local_outlook(
    tier: Tier,
    first_token_s: float,
    prices: Mapping[Tier, TokenPrices] | None,
    typical: TypicalRequest,
) -> TierOutlook:
    """Return what to expect of a local model; what has no price costs nothing.

    `first_token_s`: 0 where it was not measured.
    """
    cost_usd = 0.0 if prices is None else typical.cost_usd(prices[tier])
    return TierOutlook(first_token_s=first_token_s or None, cost_usd=cost_usd)


def likely_size(prompts: Prompts, turn: Turn | None, typical: TypicalRequest) -> ConversationSize:
    """Return a request's likely size; of a new conversation, a typical one."""
    dialogue = prompts.dialogue
    num_cached_tokens = 0.0 if turn is None else turn.num_tokens
    num_prompt_tokens = typical.num_prompt_tokens.value
    if turn is not None and dialogue is not None:
        num_prompt_tokens = num_cached_tokens + dialogue.num_new_chars / _CHARS_PER_TOKEN
    return ConversationSize(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_completion_tokens=typical.likely_tokens(prompts.request.token_limit),
    )


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
