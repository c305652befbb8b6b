"""`outrider router report`: one HTML page without anything outside it, dark where the reader is."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from outrider.gateway.tools.commands.report_page import filled_page
from outrider.gateway.tools.learning.routers.inputs import RouterEvaluation
from outrider.gateway.tools.learning.routers.plots import (
    STAGE_LABELS,
    as_svg,
    calibration_figure,
    cost_quality_figure,
    quality_figure,
)
from outrider.gateway.tools.learning.routers.router_tables import (
    cost_figures,
    setting_text,
    spread_points,
)
from outrider.router.calibration import OperatingPoint, Prices, measure
from outrider.router.evaluation import BootstrapInterval, RouterReport
from outrider.router.mistakes import Mistake, MistakeGroup, find_mistakes

_MAX_SUMMARY_CHARS: Final = 150
_MAX_PROMPT_CHARS: Final = 3000
_NUM_SETTINGS: Final = 11


def report_page(judged: RouterEvaluation, prices: Prices | None) -> str:
    """The page as HTML. Everything that comes from data is escaped."""
    report = judged.report
    head, settings = _settings(judged, prices)
    setting = setting_text(report.setting, judged.rows.stages[-1])
    return filled_page(
        "learning/routers/router_report.html",
        router=escape(judged.router.resolve().name),
        subtitle=escape(_subtitle(judged)),
        lead=_lead(report),
        notes="\n".join(f'<p class="note">Note: {escape(note)}</p>' for note in judged.notes),
        figures="\n".join(_figures(report)),
        cost_quality=as_svg(cost_quality_figure(report), "worth", "Accuracy by large share"),
        calibration=as_svg(calibration_figure(report), "calibration", "Expected and found quality"),
        qualities=as_svg(
            quality_figure(judged.rows, report.setting), "qualities", "Distribution of text quality"
        ),
        setting=escape(setting[0].upper() + setting[1:]) + ".",
        stages="\n".join(_stages(report)),
        answerers="\n".join(_answerers(report)),
        settings_head=head,
        settings=settings,
        mistakes=_mistakes(judged),
        training=_training(judged.scorer.training),
    )


def _subtitle(judged: RouterEvaluation) -> str:
    parts = [f"judged on {judged.report.num_prompts:,} prompts of {judged.data_path.name}"]
    if judged.scorer.pair:
        parts.append(f"trained for the pair {judged.scorer.pair}")
    if judged.rows.answer is not None:
        parts.append(f"answers judged by their first {judged.rows.hold_back_tokens} tokens")
    return ", ".join(parts)


def _lead(report: RouterReport) -> str:
    setting = report.setting
    return (
        f"The large model answers {setting.strong_share:.1%} of the prompts, and "
        f"{setting.accuracy:.1%} of all answers are right: {setting.relative_accuracy:.1%} of the "
        f"accuracy that the large model has alone ({report.strong_accuracy:.1%}; the small one "
        f"{report.weak_accuracy:.1%})."
    )


def _figures(report: RouterReport) -> Iterable[str]:
    best = report.best_stage
    figures = (
        ("APGR", f"{best.apgr.value:.3f}", f"random 0.5, oracle {report.oracle_apgr:.2f}"),
        ("CPT(50 %)", f"{best.cpt50.value:.1%}", "random 50 %"),
        ("CPT(80 %)", f"{best.cpt80.value:.1%}", "random 80 %"),
        (
            "accuracy",
            f"{report.setting.accuracy:.3f}",
            f"best single model {report.best_single_accuracy:.3f}",
        ),
        (
            "large share",
            f"{report.setting.strong_share:.1%}",
            f"an oracle needs {report.oracle_share:.1%}",
        ),
        ("calibration error", f"{best.ece:.3f}", f"{best.stage} stage"),
    )
    for name, value, beside in figures:
        yield f"<li><span>{name}</span><b>{value}</b><span>{beside}</span></li>"


def _stages(report: RouterReport) -> Iterable[str]:
    for name, stage in report.stages.items():
        yield _row(
            STAGE_LABELS[name],
            _figure(stage.apgr),
            _share(stage.cpt50),
            _share(stage.cpt80),
            f"{stage.ece:.3f}",
        )
    yield _row(
        "at random",
        f"{report.random_apgr:.3f}",
        f"{report.random_cpt50:.1%}",
        f"{report.random_cpt80:.1%}",
        "",
    )
    yield _row("oracle", f"{report.oracle_apgr:.3f}", "", "", "")


def _answerers(report: RouterReport) -> Iterable[str]:
    yield _row("always small", f"{report.weak_accuracy:.3f}", "0 %")
    yield _row("always large", f"{report.strong_accuracy:.3f}", "100 %")
    yield _row(
        "this router",
        _figure(report.setting_accuracy),
        _share(report.setting_share),
        is_chosen=True,
    )
    yield _row("oracle", f"{report.oracle_accuracy:.3f}", f"{report.oracle_share:.1%}")


def _settings(judged: RouterEvaluation, prices: Prices | None) -> tuple[str, str]:
    """The head and the rows of the table of settings, each measured on these prompts."""
    calibration = judged.scorer.calibration
    own = judged.report.setting
    shown: dict[tuple[Any, ...], OperatingPoint] = {(own.threshold, own.band): own}
    for point in () if calibration is None else spread_points(calibration.points, _NUM_SETTINGS):
        shown.setdefault(
            (point.threshold, point.band), measure(judged.rows, point.threshold, point.band)
        )
    points = sorted(shown.values(), key=lambda point: (point.strong_share, point.threshold))
    costs = [cost_figures(judged.rows, point, prices) for point in points]
    names = {"mean_cost_usd": "USD a request", "median_s": "seconds (median)"}
    extra = [name for name in names if name in costs[0]]
    head = ["large share", "watched", "accuracy", "of large", "threshold", "band"]
    rows = [
        _row(
            f"{point.strong_share:.1%}",
            f"{point.watched_share:.1%}",
            f"{point.accuracy:.3f}",
            f"{point.relative_accuracy:.1%}",
            f"{point.threshold:.3f}",
            "none" if point.band is None else f"{point.band[0]:.3f} to {point.band[1]:.3f}",
            *(f"{figures[name]:.3g}" for name in extra),
            is_chosen=point == own,
        )
        for point, figures in zip(points, costs, strict=True)
    ]
    cells = "".join(f"<th>{name}</th>" for name in [*head, *(names[name] for name in extra)])
    return cells, "\n".join(rows)


def _mistakes(judged: RouterEvaluation) -> str:
    mistakes = find_mistakes(judged.data.prompts, judged.rows, judged.report.setting)
    return "\n".join(
        (
            _group(
                "The small model answered, the large one would have been better",
                mistakes.missed,
                "of the prompts that the small model answered",
            ),
            _group(
                "The large model answered, and was no better",
                mistakes.needless,
                "of the prompts that the large model answered",
            ),
        )
    )


def _group(title: str, group: MistakeGroup, among: str) -> str:
    if not group.num_mistakes:
        return f"<h3>{title}</h3>\n<p>None {among} ({group.num_decisions}).</p>"
    share = group.num_mistakes / group.num_decisions
    parts = [
        f"<h3>{title}</h3>",
        f"<p>{group.num_mistakes} ({share:.1%}) {among}. Those that the router was surest about, "
        "with its quality:</p>",
        '<ol class="examples">',
        *(_example(mistake) for mistake in group.examples),
        "</ol>",
    ]
    if group.words:
        words = "".join(
            f"<span>{escape(entry.text)} {entry.share_of_mistakes:.0%} : "
            f"{entry.share_of_others:.0%}</span>"
            for entry in group.words
        )
        parts.append(
            "<p>Words that these prompts have more often than the others so answered (share of "
            f'these : of the others; digits are 0):</p>\n<p class="words">{words}</p>'
        )
    return "\n".join(parts)


def _example(mistake: Mistake) -> str:
    line = " ".join(mistake.prompt.split())
    at = f'<span class="at">{mistake.quality:.2f}</span>'
    if len(line) <= _MAX_SUMMARY_CHARS and line == mistake.prompt.strip():
        return f"<li>{at}{escape(line)}</li>"
    whole = mistake.prompt[:_MAX_PROMPT_CHARS]
    if len(mistake.prompt) > _MAX_PROMPT_CHARS:
        whole += " …"
    summary = line if len(line) <= _MAX_SUMMARY_CHARS else line[:_MAX_SUMMARY_CHARS] + " …"
    return (
        f"<li><details><summary>{at}{escape(summary)}</summary><pre>{escape(whole)}</pre>"
        "</details></li>"
    )


def _training(record: Mapping[str, Any]) -> str:
    """The record as a table of names and values, as far as they are plain."""
    rows = [
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_plain(value))}</td></tr>"
        for name, value in record.items()
        if isinstance(value, str | int | float)
    ]
    if not rows:
        return ""
    return (
        '<h2>How it was trained</h2>\n<div class="table"><table><tbody>'
        f"{''.join(rows)}</tbody></table></div>"
    )


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 24 else text[:16] + "…"  # checksums


def _row(*cells: str, is_chosen: bool = False) -> str:
    chosen = ' class="chosen"' if is_chosen else ""
    return f"<tr{chosen}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _figure(interval: BootstrapInterval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _share(interval: BootstrapInterval) -> str:
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"
