"""What `outrider router calibrate` weighs gains by: seconds or dollars that prompts are to cost."""

from dataclasses import asdict
from typing import Any, Literal

from outrider.gateway.tools.learning.routers.inputs import TargetFlags
from outrider.router.calibration import CalibrationError, Prices
from outrider.router.dataset import LabelledPrompts
from outrider.router.scorer import RouterScorer
from outrider.router.worth import CostUnit, ExpectedTokens
from outrider.router.worth_fit import FittedWorth, fit_worth

GainPer = Literal["request", "second", "dollar"]


def weigh(
    scorer: RouterScorer,
    data: LabelledPrompts,
    gain_per: GainPer | None,
    targets: TargetFlags,
    prices: Prices | None,
) -> FittedWorth | None:
    """Learn what prompts cost; None where each request counts alike. Raises CalibrationError."""
    if gain_per is None:
        gain_per = "request" if targets.max_seconds is None else "second"
    if gain_per == "request":
        return None
    if data.tiers is not None:
        raise CalibrationError(
            "--gain-per: tiers have the cost of a request each, by which it goes"
        )
    return fit_worth(data, scorer.features, gain_per, prices)


def weighed_json(fitted: FittedWorth) -> dict[str, Any]:
    """The rates, and how well lengths are predicted."""
    return {
        "gain_per": fitted.worth.model.unit,
        "costs": asdict(fitted.worth.model),
        "length_error_tokens": fitted.errors.predicted,
        "usual_length_error_tokens": fitted.errors.usual,
    }


def weighed_lines(fitted: FittedWorth) -> list[str]:
    """The same in words."""
    model, errors = fitted.worth.model, fitted.errors
    typical = _median(fitted.tokens)
    lines = [
        f"Gains count per {model.unit}; thresholds are those of the cheapest prompts.",
        f"Answer lengths: predicted to {errors.predicted:.1f} tokens, the usual length is "
        f"{errors.usual:.1f} off (held-out prompts, mean).",
    ]
    units: tuple[tuple[CostUnit, str], ...] = (("second", "s"), ("dollar", "USD"))
    for unit, sign in units:
        costs = fitted.worth.costs(typical, unit)
        if costs is not None:
            lines.append(
                f"A median request: small {costs.small:.3g} {sign}, cascade {costs.cascade:.3g} "
                f"{sign}, large {costs.large:.3g} {sign}."
            )
    return lines


def _median(tokens: tuple[ExpectedTokens, ...]) -> ExpectedTokens:
    middle = len(tokens) // 2
    return ExpectedTokens(
        prompt=sorted(one.prompt for one in tokens)[middle],
        small=sorted(one.small for one in tokens)[middle],
        large=sorted(one.large for one in tokens)[middle],
    )
