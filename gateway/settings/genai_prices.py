"""Prices out of genai-prices, and the snapshot of them that is used where it is not installed.

`python -m outrider.gateway.settings.genai_prices` writes the snapshot anew from the installed one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from decimal import Decimal

    from genai_prices.types import (
        ConditionalPrice,
        MatchLogic,
        ModelInfo,
        ModelPrice,
        Provider,
        TieredPrices,
    )

PROVIDERS: Final[Mapping[str, str]] = {
    "openai": "openai",
    "anthropic": "anthropic",
    "gemini": "google",
    "groq": "groq",
    "cerebras": "cerebras",
    "together": "together",
    "fireworks": "fireworks",
    "mistral": "mistral",
    "deepseek": "deepseek",
    "xai": "x-ai",
}
"""Presets by the list's names. Elsewhere prices depend on the region, the deployment or the day."""

SNAPSHOT: Final = "listed_prices.json"
_DATED: Final = "-20250101"
"""A name with a date, to see whether the list takes such names for the same model."""
_FREE_OF: Final = ("audio", "image", "video", "reasoning", "hours", "mchars", "pages", "messages")
"""Parts of the names of prices that our books have no counts for."""


class LongPrice(NamedTuple):
    """USD per million tokens of requests whose prompt has more than `above` tokens."""

    above: int
    prompt: str
    cached_prompt: str | None
    completion: str


class DatedPrice(NamedTuple):
    """USD per million tokens from a day on, as decimals. `cached_prompt` None: as other tokens."""

    since: str
    prompt: str
    cached_prompt: str | None
    completion: str
    long_prompts: Sequence[LongPrice] = ()


def at(prices: list[DatedPrice], today: date) -> DatedPrice | None:
    """Return the price of a day; `since` empty is from the beginning."""
    begun = [price for price in prices if price.since <= today.isoformat()]
    return begun[-1] if begun else None


def library_prices(service: str, name: str) -> list[DatedPrice]:
    """Return a model's prices from the installed list; none where it has no single one at a time.

    Raises ModuleNotFoundError where genai-prices is not installed.
    """
    model = _provider(service).find_model(name)
    return [] if model is None else _prices(model)


def library_source() -> str:
    """Name the installed list."""
    return f"genai-prices {version('genai-prices')}"


def _provider(service: str) -> "Provider":
    from genai_prices.data import providers

    return next(each for each in providers if each.id == PROVIDERS[service])


def _prices(model: "ModelInfo") -> list[DatedPrice]:
    """Return the prices by date. None for hours of the day, sound or images."""
    from genai_prices.types import ModelPrice

    listed = model.prices
    conditional = [("", listed)] if isinstance(listed, ModelPrice) else [*map(_dated, listed)]
    prices = [_price(since, price) for since, price in conditional]
    known = [price for price in prices if price is not None]
    return sorted(known, key=lambda each: each.since) if len(known) == len(prices) else []


def _dated(conditional: "ConditionalPrice") -> "tuple[str | None, ModelPrice]":
    from genai_prices.types import StartDateConstraint

    constraint = conditional.constraint
    if constraint is None:
        return "", conditional.prices
    if isinstance(constraint, StartDateConstraint):
        return constraint.start_date.isoformat(), conditional.prices
    return None, conditional.prices


def _price(since: str | None, price: "ModelPrice") -> DatedPrice | None:
    from genai_prices.types import TieredPrices

    amounts = (price.input_mtok, price.cache_read_mtok, price.output_mtok)
    is_other = any(part in name for name, set_ in vars(price).items() if set_ for part in _FREE_OF)
    if since is None or is_other or not (amounts[0] and amounts[2]):
        return None
    tiered = [amount for amount in amounts if isinstance(amount, TieredPrices)]
    lengths = sorted({tier.start for amount in tiered for tier in amount.tiers})
    longer = [LongPrice(above, *_rate(amounts, above + 1)) for above in lengths]
    return DatedPrice(since, *_rate(amounts, 0), longer)


def _rate(
    amounts: "Iterable[Decimal | TieredPrices | None]", num_prompt_tokens: int
) -> tuple[str, str | None, str]:
    """Return what all tokens of a request cost: prompt, cached prompt, completion."""
    found = (_at(amount, num_prompt_tokens) for amount in amounts)
    prompt, cached, completion = (None if each is None else f"{each:f}" for each in found)
    return prompt or "", cached, completion or ""


def _at(amount: "Decimal | TieredPrices | None", num_prompt_tokens: int) -> "Decimal | None":
    """Return the amount for all tokens of a request, of the last tier that its prompt exceeds."""
    from genai_prices.types import TieredPrices

    if not isinstance(amount, TieredPrices):
        return amount
    reached = (tier.price for tier in reversed(amount.tiers) if num_prompt_tokens > tier.start)
    return next(reached, amount.base)


def _named(service: str) -> "Iterator[tuple[str, ModelInfo]]":
    """Yield the names that the snapshot knows, `-*` where a date may follow."""
    provider = _provider(service)
    for model in provider.models:
        names = {model.id, model.id.removesuffix("-latest"), *_equals(model.match)}
        for name in sorted({each.lower() for each in names}):
            if provider.find_model(name) is model:
                yield name, model
            if provider.find_model(f"{name}{_DATED}") is model:
                yield f"{name}-*", model


def _equals(match: "MatchLogic") -> set[str]:
    from genai_prices.types import ClauseEquals, ClauseOr

    if isinstance(match, ClauseOr):
        return {name for each in match.or_ for name in _equals(each)}
    return {match.equals} if isinstance(match, ClauseEquals) else set()


def snapshot(today: date) -> str:
    """Return the installed list as JSON, a model a line."""
    prices = {
        service: {
            name: [_row(price) for price in found]
            for name, model in sorted(_named(service))
            if (found := _prices(model))
        }
        for service in PROVIDERS
    }
    lines = ",\n".join(
        f"{json.dumps(service)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in models.items())
        + "\n}"
        for service, models in prices.items()
    )
    source = json.dumps(f"{library_source()} of {today}")
    return f'{{"source": {source}, "prices": {{\n{lines}\n}}}}\n'


def _row(price: DatedPrice) -> tuple[object, ...]:
    """Return a price without the part that most have not."""
    return price if price.long_prompts else price[:-1]


if __name__ == "__main__":
    Path(__file__).with_name(SNAPSHOT).write_text(snapshot(datetime.now(UTC).date()), "utf-8")
