"""Prices of known models, from the dated list beside this module."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.gateway.settings.presets import PRESETS
from outrider.gateway.settings.sections import split_list

_FILE: Final = "listed_prices.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPrice:
    """Prices of a model's tokens in USD per million, as `source` gave them on `date`.

    `cached_prompt` None: cached tokens cost as others.
    """

    prompt: float
    cached_prompt: float | None = None
    completion: float
    date: date
    source: str


@cache
def listed_prices() -> Mapping[tuple[str, str], ListedPrice]:
    """Read the list: prices by the service's preset and the model's name there."""
    document = tomllib.loads(files("outrider.gateway.settings").joinpath(_FILE).read_text("utf-8"))
    found: dict[tuple[str, str], ListedPrice] = {}
    for entry in document["prices"]:
        service, names = entry.pop("service"), entry.pop("names")
        entry["source"] = document["sources"][entry["source"]]
        price = ListedPrice(**entry)
        found |= {(service, name): price for name in names}
    return found


def listed_price(
    preset: str | None, urls: Iterable[object], model: str | None
) -> ListedPrice | None:
    """Return a model's listed price; None where there is none.

    The service is the preset's, else the one whose own host is in every address.
    """
    service = preset or _service_of(urls)
    return None if service is None or model is None else listed_prices().get((service, model))


def with_listed_price(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier's settings with its model's listed price, unless they name a price."""
    filled = dict(values)
    preset, model, urls = filled.get("preset"), filled.get("model"), split_list(filled.get("url"))
    if "price" in filled or not isinstance(preset, str | None) or not isinstance(model, str):
        return filled
    listed = listed_price(preset, urls if isinstance(urls, list | tuple) else (), model)
    if listed is not None:
        names = ("prompt", "cached_prompt", "completion")
        filled["price"] = {name: getattr(listed, name) for name in names}
    return filled


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
