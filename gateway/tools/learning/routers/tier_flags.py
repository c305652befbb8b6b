"""Reads `--tiers` and `--accuracy` of `outrider router train`."""

from collections.abc import Mapping
from pathlib import Path

from outrider.gateway.settings.tree import load_settings
from outrider.router.costs import TokenPrices, TypicalRequest
from outrider.router.dataset import RouterDataError
from outrider.router.tier_labels import TierTerms


def tier_terms(tiers: str, accuracies: str, config: Path | None) -> list[TierTerms]:
    """Return the tiers that the flags name.

    What a typical request costs by the settings' prices counts where nothing else tells it. Raises
    RouterDataError, and SettingsError for bad settings.
    """
    costs, stated = _numbers(tiers, "--tiers"), _numbers(accuracies, "--accuracy")
    for name, accuracy in stated.items():
        if name not in costs:
            raise RouterDataError(f"--accuracy: {name} is none of --tiers")
        if accuracy is None or not 0.0 < accuracy < 1.0:
            raise RouterDataError(f"--accuracy: {name}={accuracy} must be between 0 and 1")
    usual = _usual_costs(config)
    return [
        TierTerms(name=name, cost=cost, usual_cost=usual.get(name), accuracy=stated.get(name))
        for name, cost in costs.items()
    ]


def _usual_costs(config: Path | None) -> Mapping[str, float]:
    typical = TypicalRequest()
    return {
        name: typical.cost_usd(
            TokenPrices(
                prompt=tier.price.prompt,
                cached_prompt=tier.price.cached,
                completion=tier.price.completion,
            )
        )
        for name, tier in load_settings(config_file=config).tiers.items()
        if tier.has_price
    }


def _numbers(text: str, flag: str) -> dict[str, float | None]:
    """Return the numbers of NAME or NAME=NUMBER, separated by commas."""
    found: dict[str, float | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.rpartition("=") if "=" in part else (part, "", "")
        if name in found:
            raise RouterDataError(f"{flag}: {name} is named twice")
        try:
            found[name] = float(number) if equals else None
        except ValueError:
            raise RouterDataError(f"{flag}: {number!r} of {name} is not a number") from None
    return found
