"""The cards of GET /v1/models, with the prices of what answers."""

import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from msgspec.structs import replace

from outrider.gateway.answering.reading.model_catalog import ListedModel
from outrider.gateway.contract.schema.model_cards import (
    LongPromptPricing,
    ModelCard,
    Pricing,
    TierCard,
    UpstreamCard,
)
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.routing import TierPriceSettings
from outrider.gateway.tenancy.ledger.prices import PriceBook

# Clients sort models by age; that of an upstream server's is not known.
_STARTED: Final = int(time.time())
_TOKENS_PER_PRICE: Final = Decimal(10**6)


def card_of(model: ListedModel, prices: PriceBook) -> ModelCard:
    """Return a model's card.

    Where several tiers may answer, its context is the largest and its price the dearest:
    a request cannot be longer, nor a token cost more.
    """
    tiers = model.behind
    known = [prices.charge_of(tier.tier) for tier in tiers if prices.is_known(tier.tier)]
    max_context: int | None = None
    contexts = [tier.max_context for tier in tiers if tier.max_context is not None]
    if len(contexts) == len(tiers):
        max_context = max(contexts, default=None)
    return ModelCard(
        id=model.id,
        object="model",
        created=model.created or _STARTED,
        owned_by=model.owned_by,
        outrider=[_priced(tier, prices) for tier in tiers],
        tier=tiers[0].tier if len(tiers) == 1 else None,
        max_context=max_context,
        max_model_len=max_context,
        context_length=max_context,
        pricing=pricing_of(known) if tiers and len(known) == len(tiers) else None,
    )


def _priced(tier: TierCard | UpstreamCard, prices: PriceBook) -> TierCard | UpstreamCard:
    if not prices.is_known(tier.tier):
        return tier
    return replace(tier, pricing=pricing_of([prices.charge_of(tier.tier)]))


def pricing_of(prices: Sequence[UpstreamPriceSettings]) -> Pricing:
    """Return prices of single tokens; of several tiers, the dearest."""
    lengths = sorted({longer.above for price in prices for longer in price.long_prompts})
    longer = [
        LongPromptPricing(length, *_dearest([price.at(length + 1) for price in prices]))
        for length in lengths
    ]
    return Pricing("USD", *_dearest(prices), long_prompts=longer or None)


def _dearest(prices: Sequence[TierPriceSettings]) -> tuple[str, str, str]:
    """USD for a token of a prompt, of one in the cache, of an answer, as texts."""
    return (
        _per_token(max(price.prompt for price in prices)),
        _per_token(max(price.cached for price in prices)),
        _per_token(max(price.completion for price in prices)),
    )


def _per_token(usd_per_million: float) -> str:
    """Exact, and never in powers of ten."""
    per_token = Decimal(str(usd_per_million)) / _TOKENS_PER_PRICE
    return f"{per_token.normalize():f}"
