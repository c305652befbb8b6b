"""The tables of a run and of a comparison, for a terminal and for a page, each written once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    CategorySummary,
    IntervalEstimate,
    Quantities,
    SearchStep,
    Summary,
)
from outrider.gateway.tools.reports.grids import Grid

ERROR_WORDS: Final[Mapping[str, str]] = {
    "unreachable": "no connection",
    "timeout": "no whole answer in time",
    "stall": "no data for too long",
    "rate_limited": "refused for now (429)",
    "refused": "refused (another 4xx)",
    "server_error": "failed (5xx, or within the stream)",
    "broken": "the connection ended before the answer",
    "garbage": "not an answer of this API",
    "empty": "an answer without a token",
    "unfinished": "not over at the end of the run",
}


# ---- figures ----------------------------------------------------------------------------------


def figure_text(value: float, *, digits: int = 4) -> str:
    """So many digits, no exponent for what people count."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def interval_text(estimate: IntervalEstimate, *, digits: int = 4) -> str:
    """Write `[low, high]`, … for a bound that is not known; empty where neither is."""
    if estimate.low is None and estimate.high is None:
        return ""
    bounds = (estimate.low, estimate.high)
    low, high = ("…" if one is None else figure_text(one, digits=digits) for one in bounds)
    return f"[{low}, {high}]"


def estimate_text(estimate: IntervalEstimate) -> str:
    """The figure and its interval, whose bounds have three digits."""
    return f"{figure_text(estimate.value)} {interval_text(estimate, digits=3)}".strip()


def share_text(estimate: IntervalEstimate | None) -> str:
    """A share and its interval in percent; empty for none."""
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.1%}"
    return f"{estimate.value:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _brief(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _quantile(found: Quantities | None, name: str) -> str:
    return "" if found is None else figure_text(getattr(found, name).value)


# ---- one run ----------------------------------------------------------------------------------


def latency_grid(summary: Summary, *, shows_intervals: bool = True) -> Grid:
    """Each latency's mean and quantiles, milliseconds."""
    entries = (
        ("time to first token", summary.ttft_ms),
        ("TTFT, from when sent", summary.sent_ttft_ms),
        ("between two events (ITL)", summary.itl_ms),
        ("per token (TPOT)", summary.tpot_ms),
        ("whole answer (E2E)", summary.e2e_ms),
        ("E2E, from when sent", summary.sent_e2e_ms),
        ("sent late by", summary.schedule.lateness_ms),
    )
    rows = [
        [name, *_quantiles(values, shows_intervals)]
        for name, values in entries
        if values is not None
    ]
    head = ["milliseconds", "mean", "p50", "p90", "p95", "p99", "min", "max", "samples"]
    return Grid(head=head, rows=rows)


def _quantiles(values: Quantities, shows_intervals: bool) -> Iterator[str]:
    for estimate in (values.mean, values.p50, values.p90, values.p95, values.p99):
        yield estimate_text(estimate) if shows_intervals else figure_text(estimate.value)
    yield figure_text(values.minimum)
    yield figure_text(values.maximum)
    yield f"{values.num_samples:,}"


def category_grid(summary: Summary) -> Grid:
    """Latency, attainment and acceptance by category."""
    head = ["category", "requests", "failed", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p50"]
    head += ["attained", "accepted", "tokens/pass"]
    return Grid(head=head, rows=[_category(one) for one in summary.categories])


def _category(entry: CategorySummary) -> list[str]:
    acceptance = entry.acceptance
    share = None if acceptance is None else acceptance.share
    return [
        entry.name or "(none)",
        f"{entry.num_requests:,}",
        str(entry.num_failed),
        _quantile(entry.ttft_ms, "p50"),
        _quantile(entry.ttft_ms, "p99"),
        _quantile(entry.tpot_ms, "p50"),
        _quantile(entry.e2e_ms, "p50"),
        "" if entry.attainment is None else f"{entry.attainment.value:.1%}",
        "" if share is None else f"{share:.1%}",
        "" if acceptance is None or share is None else _brief(acceptance.mean_emitted_tokens),
    ]


def error_grid(result: BenchResult) -> Grid:
    """Failed requests by kind of failure, the most frequent first, each with a message."""
    examples: dict[str, str] = {}
    for row in result.measured:
        if row.error is not None and row.message:
            examples.setdefault(row.error, row.message)
    rows = [
        [ERROR_WORDS.get(kind, kind), str(num), examples.get(kind, "")[:200]]
        for kind, num in sorted(result.summary.errors.items(), key=lambda entry: -entry[1])
    ]
    return Grid(head=["what failed", "requests", "one of them"], rows=rows)


def search_grid(steps: Sequence[SearchStep]) -> Grid:
    """The rates that a search tried, in this order."""
    head = ["requests/s", "attained", "goodput", "TTFT p95", "TTFT p99", "TPOT p95", "TPOT p99"]
    rows = [
        [
            figure_text(step.rate_per_s),
            share_text(step.summary.attainment),
            _brief(step.summary.goodput_per_s),
            _quantile(step.summary.ttft_ms, "p95"),
            _quantile(step.summary.ttft_ms, "p99"),
            _quantile(step.summary.tpot_ms, "p95"),
            _quantile(step.summary.tpot_ms, "p99"),
            str(step.summary.num_failed),
            "yes" if step.is_enough else "no",
        ]
        for step in steps
    ]
    return Grid(head=[*head, "failed", "enough"], rows=rows)


def conditions_grid(result: BenchResult) -> Grid:
    """All that was recorded of the conditions."""
    meta: dict[str, Any] = msgspec.to_builtins(result.meta)
    meta.pop("notes")
    meta["objectives"] = msgspec.to_builtins(result.objectives)
    rows = [[name, text] for name, text in _flat(meta) if text]
    return Grid(head=["condition", ""], rows=rows, name="conditions")


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, entry in value.items():
        title = f"{prefix}{name}".replace("_", " ")
        if isinstance(entry, Mapping):
            yield from _flat(entry, f"{prefix}{name}.")
        elif entry is not None and entry != []:
            yield title, str(entry)


# ---- two runs ---------------------------------------------------------------------------------


def comparison_grid(comparison: RunComparison) -> Grid:
    """The differences. The verdict stands beside the name: no screen is too narrow for it."""
    head = ["", "verdict", comparison.first_label, comparison.second_label]
    head += ["difference", "95 % interval", "ratio", "95 % interval"]
    rows = [
        [
            f"{entry.name}, {entry.unit}",
            entry.verdict,
            figure_text(entry.first),
            figure_text(entry.second),
            f"{entry.difference.value:+.4g}",
            interval_text(entry.difference),
            "" if entry.ratio is None else f"{entry.ratio.value:.3f}",
            "" if entry.ratio is None else interval_text(entry.ratio),
        ]
        for entry in comparison.differences
    ]
    verdicts = [entry.verdict for entry in comparison.differences]
    kinds = [verdict if verdict in {"better", "worse"} else "" for verdict in verdicts]
    return Grid(head=head, rows=rows, kinds=kinds, name="comparison")


def different_grid(comparison: RunComparison) -> Grid:
    """The conditions that differ between the two runs."""
    rows = [[one.name, one.first, one.second] for one in comparison.conditions]
    head = ["", comparison.first_label, comparison.second_label]
    return Grid(head=head, rows=rows, name="conditions")
