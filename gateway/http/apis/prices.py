"""Prices of the models that GET /v1/models lists."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.sections import TierPriceSettings
from outrider.gateway.tenancy.ledger.prices import PriceBook

_TOKENS_PER_PRICE: Final = Decimal(10**6)


def with_prices(card: dict[str, Any], prices: PriceBook) -> dict[str, Any]:
    """A model's card with `tier`, `max_context` and `pricing`, which each of its tiers gets too.

    Where several tiers may answer, `tier` is null, and the others are the largest and the dearest:
    a request cannot be longer, nor a token cost more. Null for unknown prices.
    """
    tiers = card["outrider"]
    known = [prices.charge_of(tier["tier"]) for tier in tiers if prices.is_known(tier["tier"])]
    contexts = [tier["max_context"] for tier in tiers]
    is_priced = len(known) == len(tiers) and bool(tiers)
    return {
        **card,
        "tier": tiers[0]["tier"] if len(tiers) == 1 else None,
        "max_context": None if None in contexts else max(contexts, default=None),
        "pricing": _pricing(known) if is_priced else None,
        "outrider": [_priced(tier, prices) for tier in tiers],
    }


def _priced(tier: dict[str, Any], prices: PriceBook) -> dict[str, Any]:
    name = tier["tier"]
    return (
        {**tier, "pricing": _pricing([prices.charge_of(name)])} if prices.is_known(name) else tier
    )


def _pricing(prices: list[UpstreamPriceSettings]) -> dict[str, Any]:
    """USD for one token, as texts: that is how other gateways list prices."""
    lengths = sorted({longer.above for price in prices for longer in price.long_prompts})
    longer = [
        {"above": length, **_dearest([price.at(length + 1) for price in prices])}
        for length in lengths
    ]
    pricing: dict[str, Any] = {"currency": "USD", **_dearest(prices)}
    return {**pricing, "long_prompts": longer} if longer else pricing


def _dearest(prices: Sequence[TierPriceSettings]) -> dict[str, str]:
    return {
        "prompt": _per_token(max(price.prompt for price in prices)),
        "input_cache_read": _per_token(max(price.cached for price in prices)),
        "completion": _per_token(max(price.completion for price in prices)),
    }


def _per_token(usd_per_million: float) -> str:
    """Exact, and never in powers of ten."""
    per_token = Decimal(str(usd_per_million)) / _TOKENS_PER_PRICE
    return f"{per_token.normalize():f}"
