"""Final output of `outrider router`, as text and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.gateway.tools.learning.routers.inputs import RouterEvaluation
from outrider.router.calibration import (
    Calibration,
    OperatingPoint,
    Prices,
    Stage,
    StageRows,
    request_costs,
    request_seconds,
)
from outrider.router.evaluation import BootstrapInterval, StageReport
from outrider.router.scorer import RouterScorer

_NUM_ROWS = 11


def judged_json(judged: RouterEvaluation, prices: Prices | None) -> dict[str, Any]:
    """Figures of the last stage at the top level; `<figure>_interval` is [low, high]."""
    report = judged.report
    best = report.best_stage
    setting = report.setting
    return {
        "num_prompts": report.num_prompts,
        "num_duplicates": judged.data.num_duplicates,
        "num_training_prompts": judged.num_known,
        "stage": best.stage,
        **_flat("apgr", best.apgr),
        **_flat("cpt50", best.cpt50),
        **_flat("cpt80", best.cpt80),
        "ece": best.ece,
        "weak_accuracy": report.weak_accuracy,
        "strong_accuracy": report.strong_accuracy,
        "best_single_accuracy": report.best_single_accuracy,
        "random_apgr": report.random_apgr,
        "random_cpt50": report.random_cpt50,
        "random_cpt80": report.random_cpt80,
        "oracle_apgr": report.oracle_apgr,
        "oracle_accuracy": report.oracle_accuracy,
        "oracle_share": report.oracle_share,
        "oracle_curve": report.oracle_curve.tolist(),
        "threshold_accuracy": setting.accuracy,
        "threshold_strong_share": setting.strong_share,
        "setting": {
            **point_json(setting),
            "accuracy_interval": [report.setting_accuracy.low, report.setting_accuracy.high],
            "strong_share_interval": [report.setting_share.low, report.setting_share.high],
            **cost_figures(judged.rows, setting, prices),
        },
        "hold_back_tokens": judged.rows.hold_back_tokens,
        "stages": {name: _stage_json(stage) for name, stage in report.stages.items()},
        "notes": list(judged.notes),
    }


def calibration_json(calibration: Calibration) -> dict[str, Any]:
    """The chosen setting and all others, by falling strong share."""
    return {
        "stage": calibration.stage,
        "chosen": point_json(calibration.chosen),
        "points": [point_json(point) for point in calibration.points],
        "quality_deciles": list(calibration.quality_deciles),
    }


def point_json(point: OperatingPoint) -> dict[str, Any]:
    """One setting."""
    return {
        "threshold": point.threshold,
        "band": None if point.band is None else list(point.band),
        "strong_share": point.strong_share,
        "watched_share": point.watched_share,
        "accuracy": point.accuracy,
        "relative_accuracy": point.relative_accuracy,
    }


def cost_figures(rows: StageRows, point: OperatingPoint, prices: Prices | None) -> dict[str, float]:
    """Mean USD and median seconds of a request, as far as data and prices tell."""
    figures: dict[str, float] = {}
    tokens = (rows.num_prompt_tokens, rows.num_weak_tokens, rows.num_strong_tokens)
    if prices is not None and all(counts is not None for counts in tokens):
        figures["mean_cost_usd"] = float(request_costs(rows, point, prices).mean())
    if all(values is not None for values in (rows.weak_s, rows.strong_s, rows.num_weak_tokens)):
        figures["median_s"] = float(np.median(request_seconds(rows, point)))
    return figures


def judged_table(judged: RouterEvaluation, prices: Prices | None) -> str:
    """The figures beside random, best single and oracle."""
    report = judged.report
    setting = report.setting
    lines = [
        f"{report.num_prompts} prompts of {judged.data_path.name}; intervals: bootstrap, 95 %",
        "",
        f"{'':14}{'APGR':24}{'CPT(50%)':26}{'CPT(80%)':26}ECE",
    ]
    lines += [
        f"{name:14}{_figure(stage.apgr):24}{_share(stage.cpt50):26}{_share(stage.cpt80):26}"
        f"{stage.ece:.3f}"
        for name, stage in report.stages.items()
    ]
    lines += [
        f"{'random':14}{report.random_apgr:<24.3f}{report.random_cpt50:<26.1%}"
        f"{report.random_cpt80:<26.1%}",
        f"{'oracle':14}{report.oracle_apgr:<24.3f}",
        "",
        f"{'':14}{'accuracy':24}{'large share':26}",
        f"{'always small':14}{report.weak_accuracy:<24.3f}{0:<26.1%}",
        f"{'always large':14}{report.strong_accuracy:<24.3f}{1:<26.1%}",
        f"{'best single':14}{report.best_single_accuracy:<24.3f}",
        f"{'this router':14}{_figure(report.setting_accuracy):24}{_share(report.setting_share):26}"
        f"{_costs(cost_figures(judged.rows, setting, prices))}",
        f"{'oracle':14}{report.oracle_accuracy:<24.3f}{report.oracle_share:<26.1%}",
        "",
        f"This router: {setting_text(setting, judged.rows.stages[-1])}.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def setting_text(point: OperatingPoint, stage: Stage) -> str:
    """In words, what a setting does; `stage` is what it decides by."""
    if point.band is None:
        what = "text quality" if stage == "text" else "quality"
        return f"the small model answers from a {what} of {point.threshold:.3f} on"
    low, high = point.band
    last = {"text": "the text decides", "prompt": "the probe decides"}.get(
        stage, "the small model begins and its answer is judged"
    )
    if low == high:
        return f"the text alone decides, the small model answers from a quality of {low:.3f} on"
    parts = [
        f"small from a text quality of {high:.3f} on" if high <= 1.0 else "small at once for none",
        f"large below {low:.3f}" if low > 0.0 else "large at once for none",
    ]
    return (
        f"{', '.join(parts)}; in between ({point.watched_share:.1%}) {last} "
        f"(at {point.threshold:.3f})"
    )


def calibration_table(calibration: Calibration, rows: StageRows, prices: Prices | None) -> str:
    """About eleven settings over the range of shares and the chosen one."""
    chosen = calibration.chosen
    shown = {point.threshold: point for point in spread_points(calibration.points, _NUM_ROWS)}
    shown[chosen.threshold] = chosen
    lines = [
        f"  {'large share':>11} {'watched':>8} {'accuracy':>9} {'of large':>9} {'threshold':>10}"
        f"  {'band':16}"
    ]
    for point in sorted(shown.values(), key=lambda point: point.strong_share):
        mark = ">" if point == chosen else " "
        band = "-" if point.band is None else f"{point.band[0]:.3f} to {point.band[1]:.3f}"
        lines.append(
            f"{mark} {point.strong_share:>11.1%} {point.watched_share:>8.1%} "
            f"{point.accuracy:>9.3f} {point.relative_accuracy:>9.1%} {point.threshold:>10.3f}  "
            f"{band:16}"
            f"{_costs(cost_figures(rows, point, prices))}"
        )
    lines += ["", f"Chosen (>): {setting_text(chosen, calibration.stage)}."]
    return "\n".join(line.rstrip() for line in lines)


def spread_points(points: Sequence[OperatingPoint], most: int) -> list[OperatingPoint]:
    """At most so many points, nearest to evenly spaced strong shares."""
    wanted = np.linspace(0.0, 1.0, most)
    shares = np.array([point.strong_share for point in points])
    places = sorted({int(np.abs(shares - share).argmin()) for share in wanted.tolist()})
    return [points[place] for place in places]


def training_lines(scorer: RouterScorer) -> list[str]:
    """Return lines about the training, from the record that it leaves in the router."""
    record: Mapping[str, Any] = scorer.training
    lines = [f"  always small           accuracy {record['weak_accuracy']:.3f}"]
    if record["strong_accuracy"] is None:
        lines.append("  always large           no labels: taken as never wrong")
    else:
        lines.append(f"  always large           accuracy {record['strong_accuracy']:.3f}")
    calibration = scorer.calibration
    assert calibration is not None  # train_router calibrates
    chosen = calibration.chosen
    lines.append(
        f"  this router            accuracy {chosen.accuracy:.3f} with {chosen.strong_share:.1%} "
        "answered by large (held-out folds)"
    )
    lines.append(f"  {setting_text(chosen, calibration.stage)}")
    if scorer.threshold == 0.0:
        lines.append("  note: the large model adds nothing on these data, so it is never used")
    return lines


def _stage_json(stage: StageReport) -> dict[str, Any]:
    return {
        **_flat("apgr", stage.apgr),
        **_flat("cpt50", stage.cpt50),
        **_flat("cpt80", stage.cpt80),
        "ece": stage.ece,
        "curve": stage.curve.tolist(),
        "curve_interval": [stage.curve_low.tolist(), stage.curve_high.tolist()],
        "calibration": [
            {
                "expected": entry.expected,
                "observed": entry.observed,
                "standard_error": entry.standard_error,
                "num_prompts": entry.num_prompts,
            }
            for entry in stage.bins
        ],
    }


def _flat(name: str, interval: BootstrapInterval) -> dict[str, Any]:
    return {name: interval.value, f"{name}_interval": [interval.low, interval.high]}


def _figure(interval: BootstrapInterval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _share(interval: BootstrapInterval) -> str:
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def _costs(figures: Mapping[str, float]) -> str:
    parts = []
    if "mean_cost_usd" in figures:
        parts.append(f"{figures['mean_cost_usd']:.3g} USD a request")
    if "median_s" in figures:
        parts.append(f"{figures['median_s']:.3g} s (median)")
    return ", ".join(parts)
