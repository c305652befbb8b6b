"""Prices in the cards of GET /v1/models."""

import time
from typing import Any

from outrider.gateway.answering.reading.model_catalog import ListedModel
from outrider.gateway.contract.schema.model_cards import (
    LongPromptPricing,
    ModelCard,
    Pricing,
    TierCard,
    UpstreamCard,
)
from outrider.gateway.http.apis.prices import card_of
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.verifier.params import Tier

CLOUD = UpstreamCard(tier="cloud", model_id="m", max_context=None, server="openai", capabilities=[])


def tier(name: Tier, max_context: int) -> TierCard:
    return TierCard(
        tier=name,
        model_id=f"test/{name}",
        max_context=max_context,
        num_parameters=5,
        dtype="float32",
        device="cpu",
        capabilities=["tools"],
        tool_format="hermes",
    )


def card(prices: PriceBook, *tiers: TierCard | UpstreamCard) -> ModelCard:
    return card_of(ListedModel(id="auto", owned_by="outrider", behind=tiers), prices)


def pricing(made: ModelCard | TierCard | UpstreamCard) -> Pricing:
    assert made.pricing is not None
    return made.pricing


def book(**sections: Any) -> PriceBook:
    return PriceBook.from_settings(Settings.model_validate(sections))


PRICES = {
    "small": {"prompt": 0.15, "completion": 0.6},
    "large": {"prompt": 2.5, "completion": 0.00001, "cached_prompt": 1.25},
}


def test_several_tiers_cost_at_most_what_the_dearest_does() -> None:
    made = card(book(routing={"prices": PRICES}), tier("small", 4096), tier("large", 8192))
    assert (made.tier, made.max_context) == (None, 8192)
    assert (made.max_model_len, made.context_length) == (8192, 8192)
    assert made.pricing == Pricing(
        currency="USD",
        prompt="0.0000025",
        input_cache_read="0.00000125",
        completion="0.0000006",
    )
    small, large = map(pricing, made.outrider)
    assert small.prompt == small.input_cache_read == "0.00000015"
    assert large.completion == "0.00000000001"


def test_one_tier() -> None:
    made = card(book(routing={"prices": PRICES}), tier("small", 4096))
    assert (made.tier, made.max_context) == ("small", 4096)
    assert made.pricing == made.outrider[0].pricing


def test_prices_report_the_charge_and_not_the_cost() -> None:
    charges = {"small": {"prompt": 1, "completion": 2}}
    prices = book(routing={"prices": PRICES}, charges=charges)
    assert pricing(card(prices, tier("small", 1))).prompt == "0.000001"


def test_long_prompts_cost_at_most_what_the_dearest_tiers_do() -> None:
    small = {"prompt": 1, "completion": 2}
    large = {"prompt": 0.5, "completion": 3}
    charges = {
        "small": {**small, "long_prompts": [{"above": 99, "prompt": 4, "completion": 4}]},
        "large": {**large, "long_prompts": [{"above": 200, "prompt": 5, "completion": 5}]},
    }
    made = card(book(charges=charges), tier("small", 1), tier("large", 1))
    whole = pricing(made)
    assert whole.completion == "0.000003"
    assert whole.long_prompts == [
        LongPromptPricing(
            above=above,
            prompt=f"0.00000{most}",
            input_cache_read=f"0.00000{most}",
            completion=f"0.00000{most}",
        )
        for above, most in ((99, 4), (200, 5))
    ]
    assert pricing(made.outrider[0]).long_prompts == whole.long_prompts[:1]


def test_unknown_prices_are_null() -> None:
    made = card(PriceBook.free(), tier("small", 4096), CLOUD)
    assert (made.tier, made.max_context, made.pricing) == (None, None, None)
    assert made.outrider[0].pricing is None
    partly = card(book(routing={"prices": PRICES}), tier("small", 1), CLOUD)
    assert partly.pricing is None  # the other tier may cost more
    assert pricing(partly.outrider[0]).currency == "USD"
    assert card(PriceBook.free()).pricing is None


def test_a_models_age_is_that_of_its_weights_or_of_the_server() -> None:
    known = ListedModel(id="auto", owned_by="outrider", behind=(), created=1_700_000_000)
    assert card_of(known, book()).created == 1_700_000_000
    assert abs(card(book()).created - time.time()) < 3600
