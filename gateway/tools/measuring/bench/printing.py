"""A result and a comparison in a terminal."""

from typing import Final

from rich.console import Console
from rich.markup import escape

from outrider.gateway.tools.measuring.bench.bench_tables import (
    category_grid,
    comparison_grid,
    different_grid,
    error_grid,
    figure_text,
    interval_text,
    latency_grid,
    search_grid,
    share_text,
)
from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    Objectives,
    SearchReport,
)

_WIDE: Final = 130


def print_result(console: Console, result: BenchResult) -> None:
    """Conditions, latencies, rates, errors, categories and the search."""
    meta, summary = result.meta, result.summary
    console.print(f"\n[bold]{meta.model}[/bold] at {meta.url}, {meta.workload.get('name', '')}")
    # Intervals are shown where there is room; files have them always.
    latencies = latency_grid(summary, shows_intervals=console.width >= _WIDE)
    console.print(latencies.terminal(without=("min", "samples")))
    for line in _lines(result):
        console.print(line)
    if summary.categories:
        console.print(category_grid(summary).terminal(without=("TTFT p99", "attained")))
    if result.search is not None:
        steps = sorted(result.search.steps, key=lambda step: step.rate_per_s)
        table = search_grid(steps).terminal(_headline(result.search), ("TTFT p99", "TPOT p99"))
        console.print(table)
    for note in meta.notes:
        console.print(f"[dim]note: {note}[/dim]")


def print_comparison(console: Console, comparison: RunComparison) -> None:
    """Print the differences as a table, then conditions and notes."""
    first, second = comparison.first_label, comparison.second_label
    head = f"{second} compared with {first}"
    if comparison.num_pairs:
        head += f", {comparison.num_pairs} pairs"
    console.print(comparison_grid(comparison).terminal(head))
    if (share := comparison.share_faster) is not None:
        where = interval_text(share)
        text = f"{second} answered sooner in {share.value:.1%} of the pairs {where}"
        console.print(text, markup=False)
    if comparison.conditions:
        console.print(different_grid(comparison).terminal("Different conditions"))
    for note in comparison.notes:
        console.print(f"Note: {note}", markup=False)


def _headline(search: SearchReport) -> str:
    wanted = f"{search.target_attainment:.0%} attain"
    if search.best_rate_per_s is None:
        return f"at no rate that was tried did {wanted}"
    title = f"{wanted} up to {figure_text(search.best_rate_per_s)} requests/s"
    return title + ("" if search.is_bounded else ", and perhaps beyond: no rate was too much")


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
            f"{share_text(summary.attainment)}; goodput {summary.goodput_per_s:.3g} requests/s"
        )
    if failures := error_grid(result).rows:
        told = ", ".join(f"{count} {words}" for words, count, _ in failures)
        lines.append(f"[red]{summary.num_failed} failed[/red]: {told}")
        if first := failures[0][2]:
            lines.append(f"[dim]one of them: {escape(first)}[/dim]")
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


def describe_objectives(objectives: Objectives) -> str:
    """In words, e.g. "TTFT ≤ 500 ms, TPOT ≤ 50 ms"."""
    parts = [
        ("TTFT", objectives.ttft_ms),
        ("TPOT", objectives.inter_token_ms),
        ("E2E", objectives.e2e_ms),
    ]
    told = [f"{name} ≤ {bound:g} ms" for name, bound in parts if bound is not None]
    return ", ".join(told) or "nothing"
