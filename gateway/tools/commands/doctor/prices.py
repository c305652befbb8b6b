"""Check of `outrider doctor` on prices: are the costs of upstream tiers known?"""

from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.commands.doctor.findings import Finding
from outrider.gateway.wiring.prices import SET_PRICES, listed_price_of, unpriced_tiers


def check_prices(settings: Settings) -> Finding:
    """Name the tiers without prices, and the source of each listed price that is used."""
    unpriced = unpriced_tiers(settings)
    listed = {name: listed_price_of(tier) for name, tier in settings.tiers.items()}
    details = [
        f"{name}: {settings.tiers[name].model} as listed by {price.source}"
        for name, price in listed.items()
        if price is not None
    ]
    if unpriced:
        details.append(f"no price known for {', '.join(unpriced)}, so costs count as 0")
    return Finding(
        name="prices",
        status="warning" if unpriced else "ok",
        detail="; ".join(details) or "as set, or none for your own servers",
        advice=f"{SET_PRICES[0].upper()}{SET_PRICES[1:]}." if unpriced else "",
    )
