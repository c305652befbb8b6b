"""Prices of tokens, our cost and the client's charge, in exact whole numbers."""

import hashlib
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Final, get_args

import msgspec

from outrider.gateway.contract.schema.kinds import PassedUnit, Units
from outrider.gateway.settings.passed import LongPromptPrice, UpstreamPriceSettings
from outrider.gateway.settings.routing import TierPriceSettings
from outrider.gateway.settings.tree import Settings, SettingsError

STRONG: Final = "large"
"""The tier of the "always large" comparison, unless an upstream tier replaces it."""

_UNITS_PER_NANO: Final = 10**6
_UNITS_PER_MILLION_USD: Final = 10**9
"""Prices are kept in femto-dollars (10^-15 USD) per token: nine decimals of USD per million."""
_VERSION_LENGTH: Final = 12
_TOKEN_PRICES: Final = ("prompt", "cached_prompt", "completion")


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's price in nano-dollars: our cost and the client's charge."""

    cost_nanos: int
    charge_nanos: int


class _Rate(msgspec.Struct, frozen=True, omit_defaults=True):
    """Femto-dollars per token, and per unit where units are priced in place of tokens."""

    prompt: int = 0
    cached_prompt: int = 0
    completion: int = 0
    image: int | None = None
    audio_second: int | None = None
    speech_byte: int | None = None
    above: int = 0
    long_prompts: tuple["_Rate", ...] = ()
    """The prices of all tokens of requests with longer prompts than each one's `above`, which
    rises. No price falls with it."""

    def nanos(
        self,
        num_fresh_tokens: int,
        num_cached_tokens: int,
        num_completion: int,
        units: Units | None = None,
        of_prompt: int | None = None,
    ) -> int:
        """Return whole nano-dollars, rounded down once: priced parts never exceed the whole.

        `of_prompt`: as in `PriceBook.money`.
        """
        if units is not None and (price := self.of(units.unit)) is not None:
            return units.num * price // _UNITS_PER_NANO
        rate = self._at(num_fresh_tokens + num_cached_tokens if of_prompt is None else of_prompt)
        femtos = (
            num_fresh_tokens * rate.prompt
            + num_cached_tokens * rate.cached_prompt
            + num_completion * rate.completion
        )
        return femtos // _UNITS_PER_NANO

    def _at(self, num_prompt_tokens: int) -> "_Rate":
        """Return the prices of a request with such a prompt."""
        if not self.long_prompts:
            return self
        longer = (rate for rate in reversed(self.long_prompts) if num_prompt_tokens > rate.above)
        return next(longer, self)

    def of(self, unit: PassedUnit) -> int | None:
        """Return the price of one unit; None where it is not set."""
        price: int | None = getattr(self, unit)
        return price

    def most_nanos(
        self, num_prompt_tokens: int, num_completion: int, units: Units | None = None
    ) -> int:
        """Return the most of `nanos`: with all of the prompt cached, or none of it."""
        return max(
            self.nanos(num_prompt_tokens, 0, num_completion, units),
            self.nanos(0, num_prompt_tokens, num_completion, units),
        )

    def times(self, share: Decimal) -> "_Rate":
        """Return this share of each price, rounded down."""
        prices = {
            name: int(price * share)
            for name in (*_TOKEN_PRICES, *get_args(PassedUnit))
            if (price := getattr(self, name)) is not None
        }
        longer = tuple(each.times(share) for each in self.long_prompts)
        return msgspec.structs.replace(self, long_prompts=longer, **prices)

    @property
    def is_free(self) -> bool:
        return not (self.prompt or self.cached_prompt or self.completion or self.long_prompts)


class _TierRates(msgspec.Struct, frozen=True):
    """The prices of a tier's tokens: our cost and the client's charge."""

    cost: _Rate = _Rate()
    charge: _Rate = _Rate()


class _Document(msgspec.Struct, frozen=True):
    """A price book as it is stored."""

    tiers: dict[str, _TierRates]
    strong_tier: str = STRONG
    unit: str = "femto-dollars per token"


_FREE: Final = _TierRates()


class PriceBook:
    """The prices of one time, under a version that is written into each row of the ledger.

    Amounts are sums of tokens times prices, rounded down to whole nano-dollars once for each
    attempt. Prices may rise with the length of the prompt, and never fall. So amounts never fall
    when tokens are added. The charges of a request's parts never exceed the reservation for the
    whole of it.
    """

    def __init__(self, rates: Mapping[str, _TierRates], strong_tier: str = STRONG) -> None:
        """Store the arguments. Prefer `from_settings`, `from_document` or `free`."""
        document = _Document(tiers=dict(sorted(rates.items())), strong_tier=strong_tier)
        self._rates = document.tiers
        self.strong_tier = strong_tier
        """Return the tier that would answer everything if there were no small model."""
        self.document = msgspec.json.encode(document)
        """All prices as JSON."""
        self.version = hashlib.sha256(self.document).hexdigest()[:_VERSION_LENGTH]
        """The same for the same prices, in every process."""

    @classmethod
    def from_settings(cls, settings: Settings) -> "PriceBook":
        """Return the operator's prices. Without a charge, clients pay the cost of the tokens.

        Raises SettingsError for a charge of a tier that does not exist.
        """
        costs = {
            "small": settings.routing.prices.small,
            "large": settings.routing.prices.large,
            **{name: tier.price for name, tier in settings.tiers.items()},
        }
        for name in settings.charges:
            if name not in costs:
                known = ", ".join(costs)
                raise SettingsError(f"charges.{name}: unknown tier; available: {known}")
        rates = {
            name: _TierRates(_rate(cost), _rate(settings.charges.get(name, cost)))
            for name, cost in costs.items()
        }
        return cls(rates, _strong_tier(settings))

    @classmethod
    def from_document(cls, document: bytes) -> "PriceBook":
        """Return prices stored by an earlier process. Raises ValueError for invalid ones."""
        found = msgspec.json.decode(document, type=_Document)
        return cls(found.tiers, found.strong_tier)

    @classmethod
    def free(cls) -> "PriceBook":
        """Return prices of 0 for everything, for settings without prices."""
        return cls({})

    def charging(self, share: Decimal) -> "PriceBook":
        """Return prices of the same costs that charge clients this share of these."""
        rates = {
            tier: _TierRates(each.cost, each.charge.times(share))
            for tier, each in self._rates.items()
        }
        return PriceBook(rates, self.strong_tier)

    def money(
        self,
        tier: str,
        *,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int = 0,
        units: Units | None = None,
        of_prompt: int | None = None,
    ) -> Money:
        """Return the price of tokens, or of `units` where these have one; unknown tiers are free.

        Prompt tokens include cached ones. `of_prompt`: length of the request's prompt, which
        decides on the prices, where it is not `num_prompt_tokens`: these are a part of the request,
        or of several.

        Raises ValueError for a negative number.
        """
        if num_prompt_tokens < 0 or num_completion_tokens < 0 or num_cached_tokens < 0:
            raise ValueError("numbers of tokens cannot be negative")
        rates = self._rates.get(tier, _FREE)
        num_cached = min(num_cached_tokens, num_prompt_tokens)
        parts = (num_prompt_tokens - num_cached, num_cached, num_completion_tokens)
        return Money(
            cost_nanos=rates.cost.nanos(*parts, units, of_prompt),
            charge_nanos=rates.charge.nanos(*parts, units, of_prompt),
        )

    def most(
        self,
        tier: str,
        *,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        units: Units | None = None,
    ) -> Money:
        """Return the most of `money`, for any number of cached tokens and any shorter prompt."""
        if num_prompt_tokens < 0 or num_completion_tokens < 0:
            raise ValueError("numbers of tokens cannot be negative")
        rates = self._rates.get(tier, _FREE)
        return Money(
            cost_nanos=rates.cost.most_nanos(num_prompt_tokens, num_completion_tokens, units),
            charge_nanos=rates.charge.most_nanos(num_prompt_tokens, num_completion_tokens, units),
        )

    def is_known(self, tier: str) -> bool:
        """Return whether the settings name a cost or a charge for this tier's tokens."""
        rates = self._rates.get(tier, _FREE)
        return not (rates.cost.is_free and rates.charge.is_free)

    def charges_for(self, tier: str, unit: PassedUnit) -> bool:
        """Return whether the client's charge for a tier's units is set."""
        return self._rates.get(tier, _FREE).charge.of(unit) is not None

    def prompt_thresholds(self, tier: str) -> frozenset[int]:
        """Return the lengths of prompts above which this tier's tokens cost more."""
        return frozenset(rate.above for rate in self._rates.get(tier, _FREE).cost.long_prompts)

    def charge_of(self, tier: str) -> UpstreamPriceSettings:
        """Return the client's charge for this tier's tokens, in USD per million."""
        return _price(self._rates.get(tier, _FREE).charge)

    def cost_of(self, tier: str) -> UpstreamPriceSettings:
        """Return our cost of this tier's tokens, in USD per million."""
        return _price(self._rates.get(tier, _FREE).cost)


def _rate(price: TierPriceSettings) -> _Rate:
    rate = _token_rate(price)
    if not isinstance(price, UpstreamPriceSettings):
        return rate
    known = {unit: price.of(unit) for unit in get_args(PassedUnit)}
    return msgspec.structs.replace(
        rate,
        long_prompts=tuple(_token_rate(each, each.above) for each in price.long_prompts),
        **{unit: _units(usd * 1e6) for unit, usd in known.items() if usd is not None},
    )


def _token_rate(price: TierPriceSettings, above: int = 0) -> _Rate:
    return _Rate(
        prompt=_units(price.prompt),
        cached_prompt=_units(price.cached),
        completion=_units(price.completion),
        above=above,
    )


def _units(usd_per_million: float) -> int:
    """Return femto-dollars per token, exact for the decimal as written."""
    if not math.isfinite(usd_per_million):
        raise SettingsError(f"a price cannot be {usd_per_million}")
    return round(Decimal(repr(usd_per_million)) * _UNITS_PER_MILLION_USD)


def _price(rate: _Rate) -> UpstreamPriceSettings:
    longer = (LongPromptPrice(above=each.above, **_usd(each)) for each in rate.long_prompts)
    return UpstreamPriceSettings(**_usd(rate), long_prompts=tuple(longer))


def _usd(rate: _Rate) -> dict[str, float]:
    """Return USD per million tokens."""
    return {
        name: float(Decimal(getattr(rate, name)) / _UNITS_PER_MILLION_USD) for name in _TOKEN_PRICES
    }


def _strong_tier(settings: Settings) -> str:
    """Return the tier that takes requests too hard for the small model."""
    strong = settings.handoff.strong
    has_large = settings.models.resolved()["large"] is not None
    if settings.tiers and (strong == "cloud" or (strong == "auto" and not has_large)):
        return settings.handoff.tier or next(iter(settings.tiers))
    return STRONG
