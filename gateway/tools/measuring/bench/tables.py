"""A result in a terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table

from outrider.gateway.tools.measuring.bench.figure_text import figure_text
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    IntervalEstimate,
    Objectives,
    Quantities,
    Summary,
)

_WIDE: Final = 130
_NAMES: Final = {
    "unreachable": "no connection",
    "timeout": "no whole answer in time",
    "stall": "stalled",
    "rate_limited": "refused for now (429)",
    "refused": "refused (4xx)",
    "server_error": "failed (5xx, or within the stream)",
    "broken": "broke off",
    "garbage": "no answer of this API",
    "empty": "no token",
    "unfinished": "not over at the end of the run",
}


def print_result(console: Console, result: BenchResult) -> None:
    """Conditions, latencies, rates, errors, categories and the search."""
    meta, summary = result.meta, result.summary
    console.print(f"\n[bold]{meta.model}[/bold] at {meta.url}, {meta.workload.get('name', '')}")
    console.print(_latencies(summary, shows_intervals=console.width >= _WIDE))
    for line in _lines(result):
        console.print(line)
    if summary.categories:
        console.print(_categories(summary))
    if result.search is not None:
        console.print(_search(result))
    for note in meta.notes:
        console.print(f"[dim]note: {note}[/dim]")


def _latencies(summary: Summary, *, shows_intervals: bool) -> Table:
    """95 % intervals are shown where there is room; files have them always."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms", no_wrap=True)
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    rows = [
        ("time to first token", summary.ttft_ms),
        ("  counted from sending", summary.sent_ttft_ms),
        ("between two events (ITL)", summary.itl_ms),
        ("per token (TPOT)", summary.tpot_ms),
        ("whole answer (E2E)", summary.e2e_ms),
        ("sent late by", summary.schedule.lateness_ms),
    ]
    for name, found in rows:
        if found is not None:
            table.add_row(name, *_figures(found, shows_intervals))
    return table


def _figures(found: Quantities, shows_intervals: bool) -> list[str]:
    wanted = (found.mean, found.p50, found.p90, found.p95, found.p99)
    show = _with_interval if shows_intervals else _alone
    return [show(estimate) for estimate in wanted] + [figure_text(found.maximum)]


def _alone(estimate: IntervalEstimate) -> str:
    return figure_text(estimate.value)


def _with_interval(estimate: IntervalEstimate) -> str:
    if estimate.low is None and estimate.high is None:
        return figure_text(estimate.value)
    low = "…" if estimate.low is None else f"{estimate.low:.3g}"
    high = "…" if estimate.high is None else f"{estimate.high:.3g}"
    return f"{figure_text(estimate.value)} [dim]{low}-{high}[/dim]"


def _lines(result: BenchResult) -> list[str]:
    summary = result.summary
    lines = [
        f"{summary.num_completed} of {summary.num_requests} requests answered in "
        f"{summary.duration_s:.1f} s: {summary.completed_per_s:.3g} requests/s, "
        f"{figure_text(summary.completion_tokens_per_s)} tokens/s"
        + (" (counted as events)" if summary.token_source == "chunks" else "")
        + ("" if summary.offered_per_s is None else f"; {summary.offered_per_s:.3g}/s offered")
    ]
    if summary.attainment is not None and summary.goodput_per_s is not None:
        lines.append(
            f"attainment of {describe_objectives(result.objectives)}: "
            f"{_share(summary.attainment)}; goodput {summary.goodput_per_s:.3g} requests/s"
        )
    if summary.errors:
        told = ", ".join(f"{count} {_NAMES.get(kind, kind)}" for kind, count in _errors(summary))
        lines.append(f"[red]{summary.num_failed} failed[/red]: {told}")
        first = next((row for row in result.measured if row.error is not None), None)
        if first is not None and first.message:
            lines.append(f"[dim]the first: {_plain(first.message)}[/dim]")
    cost = summary.cost
    if cost is not None and (usd := cost.usd_per_million_completion_tokens) is not None:
        lines.append(
            f"{figure_text(usd)} USD per million answer tokens, prompts included (prices: "
            f"{cost.source})"
        )
    if summary.acceptance is not None and summary.acceptance.share is not None:
        lines.append(
            f"{summary.acceptance.share:.1%} of drafted tokens accepted, "
            f"{summary.acceptance.mean_emitted_tokens:.3g} tokens a pass"
        )
    if len(summary.tiers) > 1:
        lines.append("tiers: " + ", ".join(f"{n} {name}" for name, n in summary.tiers.items()))
    return lines


def _errors(summary: Summary) -> list[tuple[str, int]]:
    return sorted(summary.errors.items(), key=lambda item: -item[1])


def _plain(text: str) -> str:
    """Brackets in a message are no markup."""
    return text.replace("[", r"\[")


def _share(estimate: IntervalEstimate) -> str:
    low, high = estimate.low, estimate.high
    if low is None or high is None:
        return f"{estimate.value:.1%}"
    return f"{estimate.value:.1%} [dim]{low:.1%}-{high:.1%}[/dim]"


def describe_objectives(objectives: Objectives) -> str:
    """In words, e.g. "TTFT ≤ 500 ms, TPOT ≤ 50 ms"."""
    parts = [
        ("TTFT", objectives.ttft_ms),
        ("TPOT", objectives.inter_token_ms),
        ("E2E", objectives.e2e_ms),
    ]
    told = [f"{name} ≤ {bound:g} ms" for name, bound in parts if bound is not None]
    return ", ".join(told) or "nothing"


def _categories(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("category", "requests", "failed", "TTFT p50", "TPOT p50", "E2E p50"):
        table.add_column(name, justify="left" if name == "category" else "right")
    table.add_column("accepted", justify="right")
    table.add_column("tokens/pass", justify="right")
    for category in summary.categories:
        acceptance = category.acceptance
        share = None if acceptance is None else acceptance.share
        table.add_row(
            category.name or "(none)",
            str(category.num_requests),
            str(category.num_failed),
            _median(category.ttft_ms),
            _median(category.tpot_ms),
            _median(category.e2e_ms),
            "" if share is None else f"{share:.1%}",
            "" if acceptance is None or share is None else f"{acceptance.mean_emitted_tokens:.3g}",
        )
    return table


def _median(found: Quantities | None) -> str:
    return "" if found is None else f"{found.p50.value:.4g}"


def _search(result: BenchResult) -> Table:
    search = result.search
    assert search is not None
    wanted = f"{search.target_attainment:.0%} attain"
    if search.best_rate_per_s is None:
        title = f"at no rate that was tried did {wanted}"
    else:
        title = f"{wanted} up to {figure_text(search.best_rate_per_s)} requests/s"
        title += "" if search.is_bounded else ", and perhaps beyond: no rate was too much"
    table = Table(box=None, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name in ("requests/s", "attainment", "goodput", "TTFT p95", "TPOT p95", "failed", "enough"):
        table.add_column(name, justify="right")
    for step in sorted(search.steps, key=lambda step: step.rate_per_s):
        summary = step.summary
        table.add_row(
            figure_text(step.rate_per_s),
            "" if summary.attainment is None else _share(summary.attainment),
            "" if summary.goodput_per_s is None else f"{summary.goodput_per_s:.3g}",
            "" if summary.ttft_ms is None else f"{summary.ttft_ms.p95.value:.4g}",
            "" if summary.tpot_ms is None else f"{summary.tpot_ms.p95.value:.4g}",
            str(summary.num_failed),
            "yes" if step.is_enough else "no",
        )
    return table
