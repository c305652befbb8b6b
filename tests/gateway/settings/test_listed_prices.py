"""Listed prices: which tier gets one, and that each is dated and has a source."""

from datetime import date
from typing import Any, get_args

import pytest

from outrider.gateway.ledger.prices import PriceBook
from outrider.gateway.settings.listed_prices import listed_prices
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.presets import PresetName
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import load_settings

MINI = UpstreamPriceSettings(prompt=0.15, cached_prompt=0.075, completion=0.6)
MINI_MODEL = {"model": "gpt-4o-mini"}
OPENAI = "https://api.openai.com/v1"


def price_of(**values: Any) -> UpstreamPriceSettings:
    return UpstreamSettings.model_validate(values).price


@pytest.mark.parametrize(
    "service",
    [
        {"preset": "openai"},
        {"preset": "openai", "url": "http://127.0.0.1:9/v1"},
        {"url": OPENAI},
        {"url": [OPENAI, "https://API.openai.com/v1"]},
    ],
)
def test_a_known_model_of_a_service_has_its_listed_price(service: dict[str, Any]) -> None:
    assert price_of(**service, **MINI_MODEL) == MINI


@pytest.mark.parametrize(
    "tier",
    [
        {"preset": "openai", "model": "gpt-4o-mini-2099-01-01"},
        {"preset": "openai"},
        {"preset": "groq", **MINI_MODEL},
        {"url": "https://api.openai.com.example/v1", **MINI_MODEL},
        {"url": [OPENAI, "https://proxy.example/v1"], **MINI_MODEL},
        {"preset": "openai", **MINI_MODEL, "price": {"prompt": 0}},
    ],
)
def test_no_price_is_guessed(tier: dict[str, Any]) -> None:
    assert price_of(**tier) == UpstreamPriceSettings()


def test_the_settings_override_the_list_as_a_whole() -> None:
    assert price_of(preset="openai", **MINI_MODEL, price={"prompt": 1}) == UpstreamPriceSettings(
        prompt=1
    )


def test_the_ledger_and_clients_pay_listed_prices() -> None:
    flags = {"tiers.cloud.preset": "openai", "tiers.cloud.model": "gpt-4o-mini"}
    book = PriceBook.from_settings(load_settings(environ={}, flags=flags))
    paid = book.money("cloud", num_prompt_tokens=1000, num_completion_tokens=10)
    assert paid.cost_nanos == paid.charge_nanos == 156_000


def test_every_entry_names_a_preset_a_date_and_a_source() -> None:
    assert {service for service, _ in listed_prices()} <= set(get_args(PresetName))
    for price in listed_prices().values():
        assert 0 < price.prompt <= price.completion
        assert price.cached_prompt is None or 0 < price.cached_prompt < price.prompt
        assert date(2025, 1, 1) < price.date
        assert price.source.startswith("https://")


@pytest.mark.parametrize("url", [5, [5], "https://[", None])
def test_an_address_that_is_none_is_left_to_its_own_check(url: object) -> None:
    with pytest.raises(ValueError, match="url"):
        price_of(url=url, **MINI_MODEL)
