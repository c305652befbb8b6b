"""`outrider bench --html`: the page of a run, and of two that are compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

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
    Summary,
)
from outrider.gateway.tools.reports.page import cards, figures, folded, notes, page


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A part of a page; `html` is put in as it is."""

    title: str
    html: str


def report_page(result: BenchResult, *, sections: Sequence[ReportSection] = ()) -> str:
    """The page of one run; `sections` come behind its figures."""
    parts = [*notes(result.meta.notes), run_section(result)]
    parts += [_section(one) for one in sections]
    parts += [
        "<h2>Conditions</h2>",
        folded("What was run, and where", conditions_grid(result).html()),
    ]
    return page(
        title=f"Benchmark of {result.meta.model}",
        subtitle=_subtitle(result),
        lead=_lead(result.summary),
        body="\n".join(parts),
    )


def comparison_page(first: BenchResult, second: BenchResult, comparison: RunComparison) -> str:
    """The page of two runs."""
    parts = [comparison_section(first, second, comparison)]
    for label, result in ((comparison.first_label, first), (comparison.second_label, second)):
        conditions = conditions_grid(result).html()
        whole = [*notes(result.meta.notes), run_section(result), "<h2>Conditions</h2>", conditions]
        parts.append(folded(f"All of {label}", "\n".join(whole)))
    return page(
        title=f"{comparison.second_label} compared with {comparison.first_label}",
        subtitle=_subtitle(first),
        lead=_comparison_lead(comparison),
        body="\n".join(parts),
    )


def run_section(result: BenchResult) -> str:
    """Figures, charts and tables of one run."""
    summary = result.summary
    parts = [
        cards(_cards(summary)),
        figures(run_figures(result)),
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
            *notes(comparison.notes),
            "<h2>Differences</h2>",
            comparison_grid(comparison).html(),
            figures(comparison_figures(first, second, comparison)),
            "<h2>Different conditions</h2>",
            different_grid(comparison).html()
            if comparison.conditions
            else "<p>No recorded condition differs.</p>",
        ]
    )


# ---- words ------------------------------------------------------------------------------------


def _section(section: ReportSection) -> str:
    return f"<h2>{escape(section.title)}</h2>\n{section.html}"


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


def _cards(summary: Summary) -> Iterator[tuple[str, str, str]]:
    for name, values in (
        ("time to first token, p50", summary.ttft_ms),
        ("time a token, p50", summary.tpot_ms),
        ("whole answer, p50", summary.e2e_ms),
    ):
        if values is not None:
            yield name, f"{figure_text(values.p50.value)} ms", _tail(values)
    yield (
        "tokens of answers a second",
        figure_text(summary.completion_tokens_per_s),
        f"{summary.completed_per_s:.3g} answers a second",
    )
    if summary.goodput_per_s is not None and summary.attainment is not None:
        share = share_text(summary.attainment)
        yield "goodput, requests a second", f"{summary.goodput_per_s:.3g}", f"{share} attained"
    cost = summary.cost
    if cost is not None and cost.usd_per_million_completion_tokens is not None:
        price = f"{cost.usd_per_million_completion_tokens:.3g} USD"
        yield "a million tokens of answers", price, f"prices: {cost.source}"
    acceptance = summary.acceptance
    if acceptance is not None and acceptance.share is not None:
        steps = f"{acceptance.mean_emitted_tokens:.2f} tokens a step"
        yield "drafted tokens accepted", f"{acceptance.share:.1%}", steps


def _tail(values: Quantities) -> str:
    return f"p95 {figure_text(values.p95.value)}, p99 {figure_text(values.p99.value)}"
