"""Prices of upstream tiers as a start finds them: which are listed ones, and which are missing."""

import logging
from typing import Final

from outrider.gateway.settings.listed_prices import ListedPrice, listed_price
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.upstream.addresses import check_url

logger = logging.getLogger(__name__)

SET_PRICES: Final = (
    "set tiers.NAME.price.prompt and tiers.NAME.price.completion (USD per million tokens), to 0 "
    "where tokens are free"
)
"""What to do for tiers without prices."""

_PAID_KINDS: Final = ("openai", "anthropic")
"""Kinds of servers that services run; the others are software that operators run themselves."""


def listed_price_of(tier: UpstreamSettings) -> ListedPrice | None:
    """Return the listed price that a tier uses; None where its price is another one."""
    listed = listed_price(tier.preset, tier.url, tier.model)
    return listed if listed is not None and listed.price == tier.price else None


def unpriced_tiers(settings: Settings) -> tuple[str, ...]:
    """Return the tiers without prices, except servers that the operator runs."""
    return tuple(
        name for name, tier in settings.tiers.items() if not tier.has_price and not _is_own(tier)
    )


def log_prices(settings: Settings) -> None:
    """Log where listed prices are used, and warn of all tiers without prices at once."""
    for name, tier in settings.tiers.items():
        listed = listed_price_of(tier)
        if listed is not None:
            logger.info(
                "listed price tier=%s model=%s source=%r usd_per_million_prompt=%g "
                "usd_per_million_completion=%g dearer_above_tokens=%s; tiers.%s.price overrides it",
                *(name, tier.model, listed.source, listed.price.prompt, listed.price.completion),
                ",".join(str(longer.above) for longer in listed.price.long_prompts) or "never",
                name,
            )
    if unpriced := unpriced_tiers(settings):
        logger.warning(
            "no price known, so costs count as 0 tiers=%s: %s", ",".join(unpriced), SET_PRICES
        )


def _is_own(tier: UpstreamSettings) -> bool:
    """Return whether a server is of this device, this network or software that one runs oneself."""
    if tier.local:
        return True
    if tier.preset is not None:
        return False
    return tier.server not in _PAID_KINDS or all(_is_private(url) for url in tier.url)


def _is_private(url: str) -> bool:
    try:
        check_url(url, allow_private=False)
    except ValueError:
        return True
    return False
