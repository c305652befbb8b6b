"""Prices of known models: genai-prices', else those of the snapshot of it beside this module."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from outrider.gateway.settings.genai_prices import (
    PROVIDERS,
    SNAPSHOT,
    DatedPrice,
    LongPrice,
    at,
    library_prices,
    library_source,
)
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.presets import PRESETS
from outrider.gateway.settings.sections import split_list

_DATE: Final = re.compile(r"-(?:\d{8}|\d{4}-\d{2}-\d{2})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPrice:
    """Prices of a model's tokens, as `source` has them."""

    price: UpstreamPriceSettings
    source: str


@cache
def read_snapshot() -> dict[str, Any]:
    """Return the snapshot's `source`, and `prices` by the service and the model's name there."""
    text = files("outrider.gateway.settings").joinpath(SNAPSHOT).read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def listed_price(
    preset: str | None,
    urls: Iterable[object],
    model: str | None,
    today: date | None = None,
) -> ListedPrice | None:
    """Return a model's listed price of a day; None where there is none.

    The service is the preset's, else the one whose own host is in every address.
    """
    service = preset or _service_of(urls)
    if service is None or service not in PROVIDERS or model is None:
        return None
    prices, source = _listed(service, model)
    found = at(prices, today or datetime.now(UTC).date())
    price = None if found is None else _settings(found)
    return None if price is None else ListedPrice(price=price, source=source)


def _settings(listed: DatedPrice) -> UpstreamPriceSettings | None:
    """Return a listed price; None for one that no tier may have: one that falls with the length."""
    longer = [LongPrice(*each)._asdict() for each in listed.long_prompts]
    amounts = {name: value for name, value in listed._asdict().items() if name != "since"}
    try:
        return UpstreamPriceSettings.model_validate({**amounts, "long_prompts": longer})
    except ValidationError:
        return None


def _listed(service: str, model: str) -> tuple[list[DatedPrice], str]:
    try:
        return library_prices(service, model), library_source()
    except ModuleNotFoundError:
        document = read_snapshot()
    known, name = document["prices"][service], model.lower()
    prices = known.get(name) or known.get(_DATE.sub("-*", name), [])
    return [DatedPrice(*price) for price in prices], document["source"]


def with_listed_price(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier's settings with its model's listed price, unless they name a price."""
    filled = dict(values)
    preset, model, urls = filled.get("preset"), filled.get("model"), split_list(filled.get("url"))
    if "price" in filled or not isinstance(preset, str | None) or not isinstance(model, str):
        return filled
    listed = listed_price(preset, urls if isinstance(urls, list | tuple) else (), model)
    return filled if listed is None else {**filled, "price": listed.price}


def _service_of(urls: Iterable[object]) -> str | None:
    hosts = {_host(url) for url in urls}
    services = [name for name, preset in PRESETS.items() if hosts == {_host(preset.url)}]
    return services[0] if services else None


def _host(url: object) -> str | None:
    """Return a URL's host; None for a text that is no URL, which another check refuses."""
    try:
        return urlsplit(str(url)).hostname
    except ValueError:
        return None
