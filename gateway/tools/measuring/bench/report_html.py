"""`outrider bench --html`: one self-contained page that follows the reader's dark mode.

It has no script and loads no font or picture: the file can be mailed, and opens anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from outrider.gateway.tools.commands.report_page import filled_page
from outrider.gateway.tools.measuring.bench.bench_tables import (
    category_grid,
    comparison_grid,
    conditions_grid,
    different_grid,
    error_grid,
    figure_text,
    latency_grid,
    search_grid,
    share_text,
)
from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.report_charts import comparison_figures, run_figures
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    Quantities,
    ResultError,
    Summary,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A part of a page; `html` is put in as it is."""

    title: str
    html: str


# ---- files ------------------------------------------------------------------------------------


def write_report(result: BenchResult, path: Path) -> None:
    """Write the page of one run. Raises ResultError where it cannot be written."""
    write_page(report_page(result), path)


def write_comparison_report(
    first: BenchResult, second: BenchResult, comparison: RunComparison, path: Path
) -> None:
    """Write the page of two runs. Raises ResultError where it cannot be written."""
    write_page(comparison_page(first, second, comparison), path)


def write_page(page: str, path: Path) -> None:
    """Write HTML. Raises ResultError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


# ---- pages ------------------------------------------------------------------------------------


def report_page(result: BenchResult, *, sections: Sequence[ReportSection] = ()) -> str:
    """The page of one run; `sections` come behind its figures."""
    parts = [*_notes(result.meta.notes), run_section(result)]
    parts += [_section(one) for one in sections]
    parts += [
        "<h2>Conditions</h2>",
        _folded("What was run, and where", conditions_grid(result).html()),
    ]
    return page(
        title=f"Benchmark of {result.meta.model}",
        subtitle=_subtitle(result),
        lead=_lead(result.summary),
        body="\n".join(parts),
    )


def comparison_page(
    first: BenchResult,
    second: BenchResult,
    comparison: RunComparison,
    *,
    sections: Sequence[ReportSection] = (),
) -> str:
    """The page of two runs; `sections` come behind the comparison."""
    parts = [comparison_section(first, second, comparison)]
    parts += [_section(one) for one in sections]
    for label, result in ((comparison.first_label, first), (comparison.second_label, second)):
        parts += [
            f"<details><summary>All of {escape(label)}</summary>",
            *_notes(result.meta.notes),
            run_section(result),
            "<h2>Conditions</h2>",
            conditions_grid(result).html(),
            "</details>",
        ]
    return page(
        title=f"{comparison.second_label} compared with {comparison.first_label}",
        subtitle=_subtitle(first),
        lead=_comparison_lead(comparison),
        body="\n".join(parts),
    )


def page(*, title: str, subtitle: str, lead: str, body: str) -> str:
    """The frame; all but the body is escaped here."""
    return filled_page(
        "measuring/bench/bench_report.html",
        title=escape(title),
        subtitle=escape(subtitle),
        lead=escape(lead),
        body=body,
    )


def run_section(result: BenchResult) -> str:
    """Figures, charts and tables of one run."""
    summary = result.summary
    parts = [
        f'<ul class="figures">{"".join(_cards(summary))}</ul>',
        '<div class="plots">',
        *run_figures(result),
        "</div>",
        "<h2>Latency</h2>",
        latency_grid(summary).html(),
    ]
    if len(summary.categories) > 1:
        parts += ["<h2>By category</h2>", category_grid(summary).html()]
    if result.search is not None:
        parts += ["<h2>Search for the highest rate</h2>", search_grid(result.search.steps).html()]
    errors = error_grid(result).html() if summary.errors else "<p>No request failed.</p>"
    return "\n".join([*parts, "<h2>Errors</h2>", errors])


def comparison_section(first: BenchResult, second: BenchResult, comparison: RunComparison) -> str:
    """Differences, charts and what was not the same."""
    return "\n".join(
        [
            *_notes(comparison.notes),
            "<h2>Differences</h2>",
            comparison_grid(comparison).html(),
            '<div class="plots">',
            *comparison_figures(first, second, comparison),
            "</div>",
            "<h2>Different conditions</h2>",
            different_grid(comparison).html()
            if comparison.conditions
            else "<p>No recorded condition differs.</p>",
        ]
    )


# ---- words ------------------------------------------------------------------------------------


def _folded(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{html}</details>"


def _section(section: ReportSection) -> str:
    return f"<h2>{escape(section.title)}</h2>\n{section.html}"


def _notes(notes: Sequence[str]) -> list[str]:
    return [f'<p class="note">Note: {escape(note)}</p>' for note in notes]


def _subtitle(result: BenchResult) -> str:
    meta = result.meta
    settings = meta.settings
    rate, concurrency = settings.get("rate_per_s"), settings.get("concurrency")
    load = f"{meta.loop} loop"
    if meta.loop == "open" and rate is not None:
        load += f", {rate:g} requests a second"
    if meta.loop == "closed" and concurrency is not None:
        load += f", {concurrency} at a time"
    name = str(meta.workload.get("name") or meta.workload.get("kind") or "prompts")
    return f"{meta.url}; {name}; {load}; {meta.started_at}; {meta.machine}"


def _lead(summary: Summary) -> str:
    text = f"{summary.num_completed:,} of {summary.num_requests:,} requests were answered"
    if (ttft := summary.ttft_ms) is not None:
        text += (
            f"; half of them began within {figure_text(ttft.p50.value)} ms and 99 % within "
            f"{figure_text(ttft.p99.value)} ms"
        )
    if (share := summary.attainment) is not None:
        text += f"; {share.value:.1%} of all requests met their objectives"
    return text + "."


def _comparison_lead(comparison: RunComparison) -> str:
    second = comparison.second_label
    names = {
        verdict: [one.name for one in comparison.differences if one.verdict == verdict]
        for verdict in ("better", "worse")
    }
    parts = [
        f"{second} is {verdict} in {', '.join(found)}" for verdict, found in names.items() if found
    ]
    text = "; ".join(parts) or "No difference was seen that chance does not explain"
    if (share := comparison.share_faster) is not None:
        text += f"; it answered sooner in {share.value:.0%} of {comparison.num_pairs} pairs"
    return text + "."


def _cards(summary: Summary) -> Iterator[str]:
    for name, values in (
        ("time to first token, p50", summary.ttft_ms),
        ("time a token, p50", summary.tpot_ms),
        ("whole answer, p50", summary.e2e_ms),
    ):
        if values is not None:
            yield _card(name, f"{figure_text(values.p50.value)} ms", _tail(values))
    yield _card(
        "tokens of answers a second",
        figure_text(summary.completion_tokens_per_s),
        f"{summary.completed_per_s:.3g} answers a second",
    )
    if summary.goodput_per_s is not None and summary.attainment is not None:
        share = share_text(summary.attainment)
        yield _card(
            "goodput, requests a second", f"{summary.goodput_per_s:.3g}", f"{share} attained"
        )
    cost = summary.cost
    if cost is not None and cost.usd_per_million_completion_tokens is not None:
        price = f"{cost.usd_per_million_completion_tokens:.3g} USD"
        yield _card("a million tokens of answers", price, f"prices: {cost.source}")
    acceptance = summary.acceptance
    if acceptance is not None and acceptance.share is not None:
        steps = f"{acceptance.mean_emitted_tokens:.2f} tokens a step"
        yield _card("drafted tokens accepted", f"{acceptance.share:.1%}", steps)


def _tail(values: Quantities) -> str:
    return f"p95 {figure_text(values.p95.value)}, p99 {figure_text(values.p99.value)}"


def _card(name: str, figure: str, beside: str) -> str:
    return f"<li><span>{name}</span><b>{escape(figure)}</b><span>{escape(beside)}</span></li>"
