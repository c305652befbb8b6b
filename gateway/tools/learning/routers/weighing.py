"""What `outrider router train` and `calibrate` weigh gains by: seconds or dollars of prompts."""

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer

from outrider.gateway.tools.learning.routers.inputs import TargetFlags
from outrider.router.calibration import (
    Calibration,
    CalibrationError,
    CalibrationTarget,
    Prices,
    calibrate,
)
from outrider.router.dataset import LabelledPrompts
from outrider.router.rows import StageRows
from outrider.router.scorer import RouterScorer
from outrider.router.worth import CostUnit, ExpectedTokens
from outrider.router.worth_fit import FittedWorth, fit_worth

GainPer = Literal["request", "second", "dollar"]
GainPerOption = Annotated[
    GainPer | None,
    typer.Option(
        help="Ask the large model where it adds most for each request, second or dollar that it "
        "costs more; default: second where the data have seconds, but request with --strong-share "
        "and --max-cost."
    ),
]


def weigh(
    scorer: RouterScorer,
    data: LabelledPrompts,
    gain_per: GainPer | None,
    targets: TargetFlags,
    prices: Prices | None,
) -> FittedWorth | None:
    """Learn what prompts cost; None where each request counts alike.

    Raises CalibrationError where the data cannot tell what was asked for.
    """
    if gain_per == "request":
        return None
    is_asked = gain_per is not None or targets.max_seconds is not None
    if data.tiers is not None:
        if is_asked:
            raise CalibrationError(
                "--gain-per: tiers have the cost of a request each, by which it goes"
            )
        return None
    if is_asked:
        return fit_worth(data, scorer.features, gain_per or "second", prices)
    counts_requests = targets.strong_share is not None or targets.max_cost is not None
    if counts_requests or data.weak_s is None or data.strong_s is None:
        return None
    try:
        return fit_worth(data, scorer.features, "second", prices)
    except CalibrationError as error:
        typer.echo(f"note: each request counts alike: {error}", err=True)
        return None


def weighed_router(
    scorer: RouterScorer, rows: StageRows, fitted: FittedWorth, target: CalibrationTarget
) -> RouterScorer:
    """Return a trained router that weighs gains, set by held-out qualities of its own prompts."""
    calibration = calibrate(fitted.weighed(rows), target)
    chosen = calibration.chosen
    training = {
        **scorer.training,
        "gain_per": fitted.worth.model.unit,
        "held_out_accuracy": chosen.accuracy,
        "held_out_strong_share": chosen.strong_share,
    }
    return replace(scorer.with_calibration(calibration, fitted.worth), training=training)


def weighed_json(fitted: FittedWorth) -> dict[str, Any]:
    """The rates, and how well lengths are predicted."""
    return {
        "gain_per": fitted.worth.model.unit,
        "costs": asdict(fitted.worth.model),
        "length_error_tokens": fitted.errors.predicted,
        "usual_length_error_tokens": fitted.errors.usual,
    }


def weighed_lines(fitted: FittedWorth, calibration: Calibration) -> list[str]:
    """The same in words, and how many settings begin answers."""
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
    if calibration.stage != "text":
        begun = sum(point.watched_share > 0.0 for point in calibration.points)
        lines.append(
            f"{begun} of {len(calibration.points)} settings begin answers; with the others "
            f"{len(fitted.tokens)} prompts do not show that it pays, so the text alone decides."
        )
    return lines


def _median(tokens: tuple[ExpectedTokens, ...]) -> ExpectedTokens:
    middle = len(tokens) // 2
    return ExpectedTokens(
        prompt=sorted(one.prompt for one in tokens)[middle],
        small=sorted(one.small for one in tokens)[middle],
        large=sorted(one.large for one in tokens)[middle],
    )
