"""What the start log and the doctor say of upstream tiers' prices."""

import logging
from typing import Any

import pytest

from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.commands.doctor.prices import check_prices
from outrider.gateway.wiring.prices import log_prices, unpriced_tiers

SERVICE = "https://host.example/v1"


def settings_of(**tiers: dict[str, Any]) -> Settings:
    flags = {f"tiers.{name}.{key}": v for name, tier in tiers.items() for key, v in tier.items()}
    return load_settings(environ={}, flags=flags)


@pytest.mark.parametrize(
    ("tier", "is_unpriced"),
    [
        ({"url": SERVICE}, True),
        ({"preset": "groq", "model": "unheard-of"}, True),
        ({"preset": "groq", "model": "llama-3.1-8b-instant"}, False),
        ({"url": SERVICE, "price.prompt": 0}, False),
        ({"url": SERVICE, "local": True}, False),
        ({"url": SERVICE, "server": "llama_cpp"}, False),
        ({"url": "http://127.0.0.1:11434/v1"}, False),
        ({"url": ["http://10.0.0.1/v1", SERVICE]}, True),
    ],
)
def test_a_server_that_costs_nothing_needs_no_price(
    tier: dict[str, Any], is_unpriced: bool
) -> None:
    assert unpriced_tiers(settings_of(cloud=tier)) == (("cloud",) if is_unpriced else ())


def test_the_start_names_listed_prices_and_missing_ones_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = {"preset": "openai", "model": "gpt-4o-mini"}
    settings = settings_of(known=known, one={"url": SERVICE}, two={"url": SERVICE})
    with caplog.at_level(logging.INFO):
        log_prices(settings)
    listed, missing = caplog.records
    assert "tier=known model=gpt-4o-mini source='genai-prices " in listed.getMessage()
    assert "tiers.known.price overrides it" in listed.getMessage()
    assert missing.levelno == logging.WARNING
    assert "tiers=one,two: set tiers.NAME.price.prompt" in missing.getMessage()

    check = check_prices(settings)
    assert check.status == "warning"
    assert "known: gpt-4o-mini as listed by genai-prices " in check.detail
    assert "one, two" in check.detail
    assert "tiers.NAME.price.prompt" in check.advice


def test_own_prices_are_not_called_listed(caplog: pytest.LogCaptureFixture) -> None:
    own = {"preset": "openai", "model": "gpt-4o-mini", "price.prompt": 0.1}
    with caplog.at_level(logging.INFO):
        log_prices(settings_of(cloud=own))
    assert not caplog.records
    assert check_prices(settings_of(cloud=own)).status == "ok"
