"""Prices in the cards of GET /v1/models."""

from typing import Any

from outrider.gateway.contract.schema.model_cards import ModelCard
from outrider.gateway.http.apis.prices import with_prices
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.ledger.prices import PriceBook
from tests.gateway.answers import read_answer

CLOUD = {
    "tier": "cloud",
    "model_id": "m",
    "max_context": None,
    "server": "openai",
    "capabilities": [],
}


def tier(name: str, max_context: int) -> dict[str, Any]:
    return {
        "tier": name,
        "model_id": f"test/{name}",
        "max_context": max_context,
        "num_parameters": 5,
        "dtype": "float32",
        "device": "cpu",
        "capabilities": ["tools"],
        "tool_format": "hermes",
    }


def card(*tiers: dict[str, Any]) -> dict[str, Any]:
    head = {"id": "auto", "object": "model", "created": 1, "owned_by": "outrider"}
    return {**head, "outrider": list(tiers)}


def book(**sections: Any) -> PriceBook:
    return PriceBook.from_settings(Settings.model_validate(sections))


PRICES = {
    "small": {"prompt": 0.15, "completion": 0.6},
    "large": {"prompt": 2.5, "completion": 0.00001, "cached_prompt": 1.25},
}


def test_several_tiers_cost_at_most_what_the_dearest_does() -> None:
    prices = book(routing={"prices": PRICES})
    made = with_prices(card(tier("small", 4096), tier("large", 8192)), prices)
    read_answer(ModelCard, made)
    assert (made["tier"], made["max_context"]) == (None, 8192)
    assert made["pricing"] == {
        "currency": "USD",
        "prompt": "0.0000025",
        "input_cache_read": "0.00000125",
        "completion": "0.0000006",
    }
    small, large = made["outrider"]
    assert small["pricing"]["prompt"] == small["pricing"]["input_cache_read"] == "0.00000015"
    assert large["pricing"]["completion"] == "0.00000000001"


def test_one_tier() -> None:
    made = with_prices(card(tier("small", 4096)), book(routing={"prices": PRICES}))
    assert (made["tier"], made["max_context"]) == ("small", 4096)
    assert made["pricing"] == made["outrider"][0]["pricing"]


def test_prices_report_the_charge_and_not_the_cost() -> None:
    charges = {"small": {"prompt": 1, "completion": 2}}
    prices = book(routing={"prices": PRICES}, charges=charges)
    assert with_prices(card(tier("small", 1)), prices)["pricing"]["prompt"] == "0.000001"


def test_long_prompts_cost_at_most_what_the_dearest_tiers_do() -> None:
    small = {"prompt": 1, "completion": 2}
    large = {"prompt": 0.5, "completion": 3}
    charges = {
        "small": {**small, "long_prompts": [{"above": 99, "prompt": 4, "completion": 4}]},
        "large": {**large, "long_prompts": [{"above": 200, "prompt": 5, "completion": 5}]},
    }
    made = with_prices(card(tier("small", 1), tier("large", 1)), book(charges=charges))
    read_answer(ModelCard, made)
    assert made["pricing"]["completion"] == "0.000003"
    assert made["pricing"]["long_prompts"] == [
        {
            "above": above,
            "prompt": f"0.00000{most}",
            "input_cache_read": f"0.00000{most}",
            "completion": f"0.00000{most}",
        }
        for above, most in ((99, 4), (200, 5))
    ]
    assert made["outrider"][0]["pricing"]["long_prompts"] == [made["pricing"]["long_prompts"][0]]


def test_unknown_prices_are_null() -> None:
    made = with_prices(card(tier("small", 4096), CLOUD), PriceBook.free())
    read_answer(ModelCard, made)
    assert (made["tier"], made["max_context"], made["pricing"]) == (None, None, None)
    assert "pricing" not in made["outrider"][0]
    partly = with_prices(card(tier("small", 1), CLOUD), book(routing={"prices": PRICES}))
    assert partly["pricing"] is None  # the other tier may cost more
    assert partly["outrider"][0]["pricing"]["currency"] == "USD"
    assert with_prices(card(), PriceBook.free())["pricing"] is None
