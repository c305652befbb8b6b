"""Final output of `outrider router`, as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from outrider.gateway.tools.commands.terminal import make_console, print_whole
from outrider.gateway.tools.learning.routers.inputs import RouterEvaluation
from outrider.gateway.tools.reports.grids import Grid
from outrider.router.calibration import (
    Calibration,
    OperatingPoint,
    Prices,
    Stage,
    StageRows,
    request_costs,
    request_seconds,
)
from outrider.router.drift import assured_quality
from outrider.router.evaluation import BootstrapInterval, RouterReport, StageReport
from outrider.router.ladder import Ladder
from outrider.router.scorer import RouterScorer

STAGE_LABELS: Final[dict[Stage, str]] = {
    "text": "text of the prompt",
    "prompt": "once the prompt is read",
    "answer": "with the answer's beginning",
}
_NUM_ROWS: Final = 11
_SHOWN_QUALITY: Final = 0.95  # of what is assured, where the router's own setting is not


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
        **_tiers_json(judged),
    }


def _tiers_json(judged: RouterEvaluation) -> dict[str, Any]:
    tiers = judged.rows.tiers
    if tiers is None:
        return {}
    chosen = tiers.chosen(judged.report.setting.threshold)
    return {
        "tiers": {
            name: {
                "share": float((chosen == place).mean()),
                "expected": float(tiers.chances[place].mean()),
                "accuracy": float(tiers.scores[place].mean()),
                "cost_usd": float(tiers.usd[place].mean()),
                "is_labelled": name not in tiers.ladder.unlabelled,
            }
            for place, name in enumerate(tiers.ladder.names)
        }
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
    if rows.tiers is not None:
        figures["mean_cost_usd"] = float(request_costs(rows, point, {}).mean())
    elif prices is not None and all(counts is not None for counts in tokens):
        figures["mean_cost_usd"] = float(request_costs(rows, point, prices).mean())
    if all(values is not None for values in (rows.weak_s, rows.strong_s, rows.num_weak_tokens)):
        figures["median_s"] = float(np.median(request_seconds(rows, point)))
    return figures


def print_judged(judged: RouterEvaluation, prices: Prices | None) -> None:
    """Print the figures beside random, best single and oracle."""
    report, console = judged.report, make_console()
    name = judged.data_path.name
    console.print(
        f"{report.num_prompts} prompts of {name}; intervals: bootstrap, 95 %", markup=False
    )
    tiers = tiers_grid(judged)
    judged_by = stages_grid(report) if tiers is None else tiers
    for grid in (judged_by, answerers_grid(judged, prices)):
        console.print()
        print_whole(console, grid.terminal())
    cheapest = _cheapest(judged.scorer)
    text = setting_text(report.setting, judged.rows.stages[-1], cheapest)
    console.print(f"\nThis router: {text}.", markup=False)


def _cheapest(scorer: RouterScorer) -> str:
    return "the small model" if scorer.tiers is None else scorer.tiers.names[0]


def stages_grid(report: RouterReport) -> Grid:
    """The worth of each stage, compared with guessing and with an oracle."""
    rows = [
        [
            STAGE_LABELS[name],
            _figure(stage.apgr),
            _share(stage.cpt50),
            _share(stage.cpt80),
            f"{stage.ece:.3f}",
        ]
        for name, stage in report.stages.items()
    ]
    shares = [f"{share:.1%}" for share in (report.random_cpt50, report.random_cpt80)]
    rows.append(["at random", f"{report.random_apgr:.3f}", *shares, ""])
    rows.append(["oracle", f"{report.oracle_apgr:.3f}", "", "", ""])
    return Grid(head=["judged by", "APGR", "CPT(50 %)", "CPT(80 %)", "ECE"], rows=rows)


def answerers_grid(judged: RouterEvaluation, prices: Prices | None) -> Grid:
    """Accuracy and large share of the router, beside what it could do less well and better."""
    report = judged.report
    costs = _costs(judged.rows, report.setting, prices)
    own = [_figure(report.setting_accuracy), _share(report.setting_share)]
    empty = [""] * len(costs)
    rows = [
        [f"always {name}", f"{accuracy:.3f}", f"{share:.1%}", *empty]
        for name, accuracy, share in _singles(judged)
    ]
    rows += [
        ["best single", f"{report.best_single_accuracy:.3f}", "", *empty],
        ["this router", *own, *costs.values()],
        ["oracle", f"{report.oracle_accuracy:.3f}", f"{report.oracle_share:.1%}", *empty],
    ]
    kinds = ["chosen" if row[0] == "this router" else "" for row in rows]
    head = ["answered by", "accuracy", _share_title(judged.rows), *costs]
    return Grid(head=head, rows=rows, kinds=kinds)


def _share_title(rows: StageRows) -> str:
    return "large share" if rows.tiers is None else "share of the cost"


def _singles(judged: RouterEvaluation) -> list[tuple[str, float, float]]:
    """Return every tier alone: name, accuracy, large share."""
    report, tiers = judged.report, judged.rows.tiers
    if tiers is None:
        return [("small", report.weak_accuracy, 0.0), ("large", report.strong_accuracy, 1.0)]
    accuracies = tiers.scores.mean(axis=1).tolist()
    return list(zip(tiers.ladder.names, accuracies, tiers.ladder.cost_shares, strict=True))


def tiers_grid(judged: RouterEvaluation) -> Grid | None:
    """How many prompts each tier answers, and how near its chances are; None for a pair."""
    tiers = judged.rows.tiers
    if tiers is None:
        return None
    chosen = tiers.chosen(judged.report.setting.threshold)
    rows = [
        [
            name + (" (no labels)" if name in tiers.ladder.unlabelled else ""),
            f"{(chosen == place).mean():.1%}",
            f"{tiers.chances[place].mean():.3f}",
            f"{tiers.scores[place].mean():.3f}",
        ]
        for place, name in enumerate(tiers.ladder.names)
    ]
    return Grid(head=["tier", "answers", "expected right", "found right"], rows=rows)


def settings_grid(
    shown: Iterable[OperatingPoint], chosen: OperatingPoint, rows: StageRows, prices: Prices | None
) -> Grid:
    """Settings by the share of the large model; the chosen one is marked."""
    points = sorted(shown, key=lambda point: (point.strong_share, point.threshold))
    head = [_share_title(rows), "watched", "accuracy", "of large", "threshold", "band"]
    cells = [
        [
            f"{'> ' if point == chosen else ''}{point.strong_share:.1%}",
            f"{point.watched_share:.1%}",
            f"{point.accuracy:.3f}",
            f"{point.relative_accuracy:.1%}",
            f"{point.threshold:.3f}",
            _band_text(point.band),
            *_costs(rows, point, prices).values(),
        ]
        for point in points
    ]
    kinds = ["chosen" if point == chosen else "" for point in points]
    return Grid(head=[*head, *_costs(rows, chosen, prices)], rows=cells, kinds=kinds)


def _band_text(band: tuple[float, float] | None) -> str:
    if band is None:
        return "none"
    low, high = band
    return f"text at {low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"


def setting_text(point: OperatingPoint, stage: Stage, cheapest: str = "the small model") -> str:
    """In words, what a setting does; `stage` is what it decides by."""
    if point.band is None:
        what = "text quality" if stage == "text" else "quality"
        return f"{cheapest} answers from a {what} of {point.threshold:.3f} on"
    low, high = point.band
    last = {"text": "the text decides", "prompt": "the prompt, once read, decides"}.get(
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


def print_calibration(calibration: Calibration, rows: StageRows, prices: Prices | None) -> None:
    """Print about eleven settings over the range of shares and the chosen one."""
    chosen, console = calibration.chosen, make_console()
    shown = {point.threshold: point for point in spread_points(calibration.points)}
    shown[chosen.threshold] = chosen
    print_whole(console, settings_grid(shown.values(), chosen, rows, prices).terminal())
    cheapest = "the small model" if rows.tiers is None else rows.tiers.ladder.names[0]
    text = setting_text(chosen, calibration.stage, cheapest)
    console.print(f"\nChosen (>): {text}.", markup=False)


def spread_points(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """About eleven of the points, nearest to evenly spaced strong shares."""
    wanted = np.linspace(0.0, 1.0, _NUM_ROWS)
    shares = np.array([point.strong_share for point in points])
    places = sorted({int(np.abs(shares - share).argmin()) for share in wanted.tolist()})
    return [points[place] for place in places]


def training_lines(scorer: RouterScorer) -> list[str]:
    """Return lines about the training, from the record that it leaves in the router."""
    record: Mapping[str, Any] = scorer.training
    lines = [f"  always small           accuracy {record['weak_accuracy']:.3f}"]
    if scorer.tiers is not None:
        lines = _tier_lines(scorer.tiers, record["left_out"])
    elif record["strong_accuracy"] is None:
        lines.append("  always large           no labels: taken as never wrong")
    else:
        lines.append(f"  always large           accuracy {record['strong_accuracy']:.3f}")
    calibration = scorer.calibration
    assert calibration is not None  # train_router calibrates
    chosen = calibration.chosen
    lines.append(
        f"  this router            accuracy {chosen.accuracy:.3f} with {chosen.strong_share:.1%} "
        f"{'answered by large' if scorer.tiers is None else 'of the cost'} (held-out folds)"
    )
    lines.append(f"  {setting_text(chosen, calibration.stage, _cheapest(scorer))}")
    for assurance in scorer.assurances:
        kept, more = assured_quality(scorer, assurance.small_weights), ""
        if kept is None:
            setting = assurance.stage(may_watch=True).setting(_SHOWN_QUALITY)
            kept, more = _SHOWN_QUALITY, f" with {setting.strong_share:.1%} answered by large"
        lines.append(
            f"  assured ({assurance.confidence:.0%})          "
            f"at least {kept:.1%} of {_dearest(scorer)}'s accuracy is kept{more}"
        )
    if scorer.threshold == 0.0:
        lines.append("  note: the large model adds nothing on these data, so it is never used")
    return lines


def _tier_lines(tiers: Ladder, left_out: Iterable[str]) -> list[str]:
    lines = []
    for name, cost, accuracy in zip(tiers.names, tiers.costs, tiers.accuracies, strict=True):
        has_none = name in tiers.unlabelled
        what = (
            (
                "expected, as it has no labels"
                if accuracy < 1.0
                else "taken as never wrong, as it has no labels"
            )
            if has_none
            else "labelled"
        )
        lines.append(f"  always {name:<15} accuracy {accuracy:.3f} ({what}), cost {cost:.3g}")
    lines += [
        f"  note: {name} is never chosen: a cheaper tier beats it everywhere" for name in left_out
    ]
    return lines


def _dearest(scorer: RouterScorer) -> str:
    return "always large" if scorer.tiers is None else f"always {scorer.tiers.names[-1]}"


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


def _costs(rows: StageRows, point: OperatingPoint, prices: Prices | None) -> dict[str, str]:
    """Cost and time of a request, by the title of its column, as far as they are known."""
    titles = {"mean_cost_usd": "USD a request", "median_s": "seconds (median)"}
    figures = cost_figures(rows, point, prices)
    return {titles[name]: f"{figure:.3g}" for name, figure in figures.items()}
