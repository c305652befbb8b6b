"""`outrider router report`: the page of a router."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from outrider.gateway.tools.learning.routers.charts import (
    calibration_chart,
    cost_quality_chart,
    quality_chart,
)
from outrider.gateway.tools.learning.routers.inputs import RouterEvaluation
from outrider.gateway.tools.learning.routers.router_tables import (
    answerers_grid,
    setting_text,
    settings_grid,
    spread_points,
    stages_grid,
)
from outrider.gateway.tools.reports.grids import Grid
from outrider.gateway.tools.reports.page import cards, figure, figures, notes, page
from outrider.router.calibration import OperatingPoint, Prices, measure
from outrider.router.evaluation import RouterReport
from outrider.router.mistakes import Mistake, MistakeGroup, find_mistakes

_MAX_SUMMARY_CHARS: Final = 150
_MAX_PROMPT_CHARS: Final = 3000
_TERMS: Final[Mapping[str, str]] = {
    "Quality": "How safe it is to let the small model answer: 1 minus the gain, that is, minus how "
    "much likelier the large model is to be right. 1: the large model adds nothing.",
    "APGR": "Average performance gap recovered: the area between the router's curve and "
    "always-small, as a share of what always-large adds. A router that guesses has 0.5. The oracle "
    "can pass 1, for it also takes the small model where only that one is right.",
    "CPT(50 %), CPT(80 %)": "The least share of prompts that the large model must answer to "
    "recover 50 % or 80 % of what it adds. Guessing needs 50 % and 80 %. Less is better.",
    "ECE": "Expected calibration error: the mean distance between expected and found quality. With "
    "few prompts a few hundredths are chance.",
    "Intervals": "95 %, from resampling the prompts. They do not cover prompts of another kind.",
}


def report_page(judged: RouterEvaluation, prices: Prices | None) -> str:
    """The page as HTML. Everything that comes from data is escaped."""
    report = judged.report
    parts = [
        *notes(judged.notes),
        cards(_cards(report)),
        "<h2>What the answers are worth</h2>",
        figures(_figures(judged)),
        "<h2>By stage</h2>",
        stages_grid(report).html(),
        answerers_grid(judged, prices).html(),
        "<h2>Other settings</h2>",
        "<p>Measured on these prompts, from always-small to always-large; the router's own is "
        "coloured. <code>outrider router calibrate</code> chooses another one.</p>",
        settings_grid(_shown_settings(judged), report.setting, judged.rows, prices).html(),
        "<h2>Where it is wrong</h2>",
        _mistakes(judged),
        *_training(judged.scorer.training),
    ]
    return page(
        title=f"Router report: {judged.router.resolve().name}",
        subtitle=_subtitle(judged),
        lead=_lead(report),
        body="\n".join(parts),
        terms=_TERMS,
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


def _cards(report: RouterReport) -> Iterator[tuple[str, str, str]]:
    best, setting = report.best_stage, report.setting
    yield "APGR", f"{best.apgr.value:.3f}", f"random 0.5, oracle {report.oracle_apgr:.2f}"
    yield "CPT(50 %)", f"{best.cpt50.value:.1%}", "random 50 %"
    yield "CPT(80 %)", f"{best.cpt80.value:.1%}", "random 80 %"
    single = f"best single model {report.best_single_accuracy:.3f}"
    yield "accuracy", f"{setting.accuracy:.3f}", single
    share = f"an oracle needs {report.oracle_share:.1%}"
    yield "large share", f"{setting.strong_share:.1%}", share
    yield "calibration error", f"{best.ece:.3f}", f"{best.stage} stage"


def _figures(judged: RouterEvaluation) -> Iterator[str]:
    report = judged.report
    yield figure(
        cost_quality_chart(report),
        "Accuracy by the large model's share.",
        "The prompts for which the router expects most of the large model go to it first. Shaded: "
        "the 95 % interval of the last stage's curve.",
    )
    yield figure(
        calibration_chart(report),
        "Does the router know how good it is?",
        "Prompts in ten groups by expected quality, and the quality found. On the dashed line it "
        "is as good as it says; bars are standard errors.",
    )
    setting = setting_text(report.setting, judged.rows.stages[-1])
    yield figure(
        quality_chart(judged.rows, report.setting),
        "Text qualities and where the setting cuts.",
        f"{setting[0].upper()}{setting[1:]}.",
    )


def _shown_settings(judged: RouterEvaluation) -> list[OperatingPoint]:
    """The router's own setting among others, each measured on these prompts."""
    calibration = judged.scorer.calibration
    own = judged.report.setting
    shown: dict[tuple[Any, ...], OperatingPoint] = {(own.threshold, own.band): own}
    for point in () if calibration is None else spread_points(calibration.points):
        shown.setdefault(
            (point.threshold, point.band), measure(judged.rows, point.threshold, point.band)
        )
    return list(shown.values())


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


def _training(record: Mapping[str, Any]) -> Iterator[str]:
    """The record as a table of names and values, as far as they are plain."""
    rows = [
        [name.replace("_", " "), _plain(value)]
        for name, value in record.items()
        if isinstance(value, str | int | float)
    ]
    if rows:
        yield "<h2>How it was trained</h2>"
        yield Grid(head=["", ""], rows=rows, name="conditions").html()


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 24 else text[:16] + "…"  # checksums
