"""Listed prices: which tier gets one, of which day, and whence."""

import json
import re
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, get_args

import pytest

from outrider.gateway.settings import listed_prices
from outrider.gateway.settings.genai_prices import (
    PROVIDERS,
    DatedPrice,
    LongPrice,
    library_source,
    snapshot,
)
from outrider.gateway.settings.listed_prices import listed_price, read_snapshot
from outrider.gateway.settings.passed import LongPromptPrice, UpstreamPriceSettings
from outrider.gateway.settings.presets import PresetName
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tenancy.ledger.prices import PriceBook

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
        for _, prompt, cached, completion, *long_prompts in prices:
            assert Decimal(prompt) > 0 < Decimal(completion)
            assert cached is None or 0 <= Decimal(cached) <= Decimal(prompt)
            for above, dearer, _, dearer_completion in chain(*long_prompts):
                assert above > 0
                assert Decimal(dearer) >= Decimal(prompt)
                assert Decimal(dearer_completion) >= Decimal(completion)


O3_FALL = date(2025, 6, 10)


@pytest.mark.parametrize(
    ("service", "model", "today", "price"),
    [
        ("openai", "o3", O3_FALL - timedelta(days=1), (10, 0.5, 40)),
        ("openai", "o3", O3_FALL, (2, 0.5, 8)),
        ("anthropic", "claude-haiku-4-5-20251001", None, (1, 0.1, 5)),
        ("anthropic", "Claude-Haiku-4-5", None, (1, 0.1, 5)),
        ("together", "meta-llama/Llama-3.3-70B-Instruct-Turbo", None, (0.88, None, 0.88)),
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
    assert found is None or (" of " in found.source) != is_installed
    used = found and found.price
    assert (used and (used.prompt, used.cached_prompt, used.completion)) == price
    assert not (used and used.long_prompts)


def longer(above: int, prompt: float, cached_prompt: float | None, completion: float) -> Any:
    return LongPromptPrice(
        above=above, prompt=prompt, cached_prompt=cached_prompt, completion=completion
    )


@pytest.mark.parametrize(
    ("service", "model", "dearer"),
    [
        ("openai", "gpt-5.4", longer(272_000, 5, 0.5, 22.5)),
        ("openai", "gpt-5.4-pro", longer(272_000, 60, None, 270)),
        ("anthropic", "claude-sonnet-4-5-20250929", longer(200_000, 6, 0.6, 22.5)),
        ("gemini", "gemini-2.5-pro", longer(200_000, 2.5, 0.25, 15)),
        ("xai", "grok-4.3", longer(199_999, 2.5, 0.4, 5)),
    ],
)
@pytest.mark.parametrize("is_installed", [False, True])
def test_real_models_that_cost_more_for_long_prompts(
    monkeypatch: pytest.MonkeyPatch, service: str, model: str, dearer: Any, is_installed: bool
) -> None:
    if is_installed:
        pytest.importorskip("genai_prices")
    else:
        monkeypatch.setitem(sys.modules, "genai_prices.data", None)
    found = listed_price(service, (), model)
    assert found is not None
    assert found.price.long_prompts == (dearer,)


@pytest.mark.parametrize("prices", [["2", "1"], ["-1", "1"]])
def test_a_list_whose_prices_no_tier_may_have_lists_no_price(
    monkeypatch: pytest.MonkeyPatch, prices: list[str]
) -> None:
    """A start with that tier would be refused for a price that its operator never wrote."""
    short, long = prices
    found = [DatedPrice("", short, None, short, [LongPrice(9, long, None, long)])]
    monkeypatch.setattr(listed_prices, "library_prices", lambda *_: found)
    assert listed_price("openai", (), "gpt-4o") is None


@pytest.mark.slow
def test_every_price_is_that_of_the_librarys_own_calculation() -> None:
    """All models, at each threshold, below and above it, with nothing, a part and all cached."""
    data = pytest.importorskip("genai_prices.data")
    types = pytest.importorskip("genai_prices.types")
    found = {provider.id: provider for provider in data.providers}
    models = [
        (found[PROVIDERS[service]], found[PROVIDERS[service]].find_model(name), service, name)
        for service, names in read_snapshot()["prices"].items()
        for name in names
        if not name.endswith("-*")
    ]
    tiers = {
        f"t{number}": {"preset": service, "model": name}
        for number, (_, _, service, name) in enumerate(models)
    }
    settings = Settings.model_validate({"tiers": tiers})
    book = PriceBook.from_settings(settings)
    now = datetime.now(UTC)
    num_compared = 0
    for (provider, model, *_), (tier, made) in zip(models, settings.tiers.items(), strict=True):
        starts = [each.above for each in made.price.long_prompts] or [1000]
        for num_prompt in {num for start in starts for num in (7, start - 1, start, start + 1)}:
            for num_cached in (0, num_prompt // 3, num_prompt):
                usage = types.Usage(
                    input_tokens=num_prompt, cache_read_tokens=num_cached, output_tokens=501
                )
                told = model.calc_price(usage, provider, genai_request_timestamp=now).total_price
                ours = book.money(
                    tier,
                    num_prompt_tokens=num_prompt,
                    num_cached_tokens=num_cached,
                    num_completion_tokens=501,
                )
                assert ours.cost_nanos == int(told * 10**9), (tiers[tier], usage)
                num_compared += 1
    assert num_compared > 5000


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
