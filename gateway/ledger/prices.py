"""Prices of tokens, our cost and the client's charge, in exact whole numbers."""

import hashlib
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Final, get_args

import msgspec

from outrider.gateway.schema.kinds import PassedUnit, Units
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.sections import TierPriceSettings
from outrider.gateway.settings.tree import Settings, SettingsError

STRONG: Final = "large"
"""The tier of the "always large" comparison, unless an upstream tier replaces it."""

_UNITS_PER_NANO: Final = 10**6
_UNITS_PER_MILLION_USD: Final = 10**9
"""Prices are kept in femto-dollars (10^-15 USD) per token: nine decimals of USD per million."""
_VERSION_LENGTH: Final = 12


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's price in nano-dollars: our cost and the client's charge."""

    cost_nanos: int
    charge_nanos: int


class _Rate(msgspec.Struct, frozen=True):
    """Femto-dollars per token, and per unit where units are priced in place of tokens."""

    prompt: int = 0
    cached_prompt: int = 0
    completion: int = 0
    image: int | None = None
    audio_second: int | None = None
    speech_byte: int | None = None

    def nanos(
        self,
        num_fresh_tokens: int,
        num_cached_tokens: int,
        num_completion: int,
        units: Units | None = None,
    ) -> int:
        """Return whole nano-dollars, rounded down once: priced parts never exceed the whole."""
        if units is not None and (price := self.of(units.unit)) is not None:
            return units.num * price // _UNITS_PER_NANO
        femtos = (
            num_fresh_tokens * self.prompt
            + num_cached_tokens * self.cached_prompt
            + num_completion * self.completion
        )
        return femtos // _UNITS_PER_NANO

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

    @property
    def is_free(self) -> bool:
        return not (self.prompt or self.cached_prompt or self.completion)


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
    attempt. So they never fall when tokens are added, and what the parts of a request are charged
    never exceed the reservation for the whole of it.
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

    def money(
        self,
        tier: str,
        *,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int = 0,
        units: Units | None = None,
    ) -> Money:
        """Return the price of tokens, or of `units` where these have one; unknown tiers are free.

        Prompt tokens include cached ones.

        Raises ValueError for a negative number.
        """
        if num_prompt_tokens < 0 or num_completion_tokens < 0 or num_cached_tokens < 0:
            raise ValueError("numbers of tokens cannot be negative")
        rates = self._rates.get(tier, _FREE)
        num_cached = min(num_cached_tokens, num_prompt_tokens)
        num_fresh = num_prompt_tokens - num_cached
        return Money(
            cost_nanos=rates.cost.nanos(num_fresh, num_cached, num_completion_tokens, units),
            charge_nanos=rates.charge.nanos(num_fresh, num_cached, num_completion_tokens, units),
        )

    def most(
        self,
        tier: str,
        *,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        units: Units | None = None,
    ) -> Money:
        """Return the most of `money`, for any number of cached tokens."""
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

    def charge_of(self, tier: str) -> TierPriceSettings:
        """Return the client's charge for this tier's tokens, in USD per million."""
        return _price(self._rates.get(tier, _FREE).charge)


def _rate(price: TierPriceSettings) -> _Rate:
    cached = price.prompt if price.cached_prompt is None else price.cached_prompt
    units: dict[str, int] = {}
    if isinstance(price, UpstreamPriceSettings):
        known = {unit: price.of(unit) for unit in get_args(PassedUnit)}
        units = {unit: _units(usd * 1e6) for unit, usd in known.items() if usd is not None}
    return _Rate(_units(price.prompt), _units(cached), _units(price.completion), **units)


def _units(usd_per_million: float) -> int:
    """Return femto-dollars per token, exact for the decimal as written."""
    if not math.isfinite(usd_per_million):
        raise SettingsError(f"a price cannot be {usd_per_million}")
    return round(Decimal(repr(usd_per_million)) * _UNITS_PER_MILLION_USD)


def _price(rate: _Rate) -> TierPriceSettings:
    prompt, cached, completion = (
        float(Decimal(units) / _UNITS_PER_MILLION_USD)
        for units in (rate.prompt, rate.cached_prompt, rate.completion)
    )
    return TierPriceSettings(prompt=prompt, cached_prompt=cached, completion=completion)


def _strong_tier(settings: Settings) -> str:
    """Return the tier that takes requests too hard for the small model."""
    strong = settings.handoff.strong
    has_large = settings.models.resolved()["large"] is not None
    if settings.tiers and (strong == "cloud" or (strong == "auto" and not has_large)):
        return settings.handoff.tier or next(iter(settings.tiers))
    return STRONG
