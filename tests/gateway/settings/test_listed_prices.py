"""Listed prices: which tier gets one, of which day, and whence."""

import json
import re
import sys
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, get_args

import pytest

from outrider.gateway.ledger.prices import PriceBook
from outrider.gateway.settings.genai_prices import PROVIDERS, library_source, snapshot
from outrider.gateway.settings.listed_prices import listed_price, read_snapshot
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


def test_every_entry_is_a_price_of_a_preset() -> None:
    document = read_snapshot()
    assert set(document["prices"]) == set(PROVIDERS) <= set(get_args(PresetName))
    assert re.fullmatch(r"genai-prices [0-9.]+ of \d{4}-\d{2}-\d{2}", document["source"])
    entries = [price for models in document["prices"].values() for price in models.values()]
    assert len(entries) > 400
    for prices in entries:
        assert [each[0] for each in prices] == sorted({each[0] for each in prices})
        for _, prompt, cached, completion in prices:
            assert Decimal(prompt) > 0 < Decimal(completion)
            assert cached is None or 0 <= Decimal(cached) <= Decimal(prompt)


O3_FALL = date(2025, 6, 10)


@pytest.mark.parametrize(
    ("service", "model", "today", "price"),
    [
        ("openai", "o3", O3_FALL - timedelta(days=1), (10, 0.5, 40)),
        ("openai", "o3", O3_FALL, (2, 0.5, 8)),
        ("anthropic", "claude-haiku-4-5-20251001", None, (1, 0.1, 5)),
        ("anthropic", "Claude-Haiku-4-5", None, (1, 0.1, 5)),
        ("together", "meta-llama/Llama-3.3-70B-Instruct-Turbo", None, (0.88, None, 0.88)),
        ("openai", "gpt-5.4", None, None),  # dearer for long prompts
        ("gemini", "gemini-2.5-flash", None, None),  # dearer for sound
        ("deepseek", "deepseek-v4-flash", None, None),  # dearer at some hours
        ("azure", "gpt-4o", None, None),  # the name of a deployment
        ("unheard-of", "gpt-4o", None, None),
    ],
)
@pytest.mark.parametrize("is_installed", [False, True])
def test_real_models(
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    model: str,
    today: date | None,
    price: tuple[float | None, ...] | None,
    is_installed: bool,
) -> None:
    """The snapshot and the library say the same."""
    if is_installed:
        pytest.importorskip("genai_prices")
    else:
        monkeypatch.setitem(sys.modules, "genai_prices.data", None)
    found = listed_price(service, (), model, today)
    assert (found and (found.prompt, found.cached_prompt, found.completion)) == price
    assert found is None or (" of " in found.source) != is_installed


def test_the_snapshot_is_what_the_command_writes() -> None:
    pytest.importorskip("genai_prices")
    source = read_snapshot()["source"]
    if not source.startswith(library_source() + " "):
        pytest.skip(f"the snapshot is of {source}")
    day = date.fromisoformat(source.split()[-1])
    assert json.loads(snapshot(day)) == read_snapshot()


@pytest.mark.parametrize("url", [5, [5], "https://[", None])
def test_an_address_that_is_none_is_left_to_its_own_check(url: object) -> None:
    with pytest.raises(ValueError, match="url"):
        price_of(url=url, **MINI_MODEL)
