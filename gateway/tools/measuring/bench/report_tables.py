"""The tables of a benchmark's report, as HTML. Everything that comes from data is escaped."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

import msgspec

from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.compare_table import interval_text
from outrider.gateway.tools.measuring.bench.figure_text import figure_text
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    CategorySummary,
    IntervalEstimate,
    Quantities,
    SearchReport,
    Summary,
)

_ERROR_WORDS: Final[Mapping[str, str]] = {
    "unreachable": "no connection",
    "timeout": "no whole answer in time",
    "stall": "no data for too long",
    "rate_limited": "too many requests (status 429)",
    "refused": "refused (another status of 4xx)",
    "server_error": "an error of the server",
    "broken": "the connection ended before the answer",
    "garbage": "not an OpenAI-compatible answer",
    "empty": "an answer without a token",
    "unfinished": "the run was over before",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, name: str = "") -> str:
    """A table of texts, which are escaped here; `name`: a class of it."""
    cells = "".join(f'<th scope="col">{escape(one)}</th>' for one in head)
    body = "\n".join(_row(row) for row in rows)
    kind = f" {name}" if name else ""
    return (
        f'<div class="table{kind}"><table><thead><tr>{cells}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[str], kind: str = "") -> str:
    start = f'<tr class="{kind}">' if kind else "<tr>"
    return start + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def latency_table(summary: Summary) -> str:
    """Each latency's mean and quantiles, milliseconds, with intervals."""
    entries = (
        ("time to first token, from when due", summary.ttft_ms),
        ("time to first token, from when sent", summary.sent_ttft_ms),
        ("gap between events (ITL)", summary.itl_ms),
        ("mean time a token (TPOT)", summary.tpot_ms),
        ("whole answer, from when due", summary.e2e_ms),
        ("whole answer, from when sent", summary.sent_e2e_ms),
        ("sent later than due", summary.schedule.lateness_ms),
    )
    rows = [[name, *_quantiles(values)] for name, values in entries if values is not None]
    head = ["milliseconds", "mean", "p50", "p90", "p95", "p99", "least", "most", "samples"]
    return table(head, rows)


def _quantiles(values: Quantities) -> Iterator[str]:
    for estimate in (values.mean, values.p50, values.p90, values.p95, values.p99):
        yield estimate_text(estimate)
    yield figure_text(values.minimum)
    yield figure_text(values.maximum)
    yield f"{values.num_samples:,}"


def estimate_text(estimate: IntervalEstimate, *, is_share: bool = False) -> str:
    """The figure and its interval."""
    if is_share:
        text = f"{estimate.value:.1%}"
        if estimate.low is None or estimate.high is None:
            return text
        return f"{text} [{estimate.low:.1%}, {estimate.high:.1%}]"
    interval = interval_text(estimate)
    return f"{figure_text(estimate.value)} {interval}".strip()


def category_table(summary: Summary) -> str:
    """Latency, attainment and acceptance by category; nothing where there is but one."""
    if len(summary.categories) < 2:
        return ""
    head = ["category", "requests", "failed", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p50"]
    head += ["attained", "drafts accepted", "tokens a step"]
    return "<h2>By category</h2>\n" + table(head, [_category(one) for one in summary.categories])


def _category(entry: CategorySummary) -> list[str]:
    def value(quantities: Quantities | None, name: str) -> str:
        return "" if quantities is None else figure_text(getattr(quantities, name).value)

    acceptance = entry.acceptance
    share = None if acceptance is None else acceptance.share
    return [
        entry.name or "(none)",
        f"{entry.num_requests:,}",
        str(entry.num_failed),
        value(entry.ttft_ms, "p50"),
        value(entry.ttft_ms, "p99"),
        value(entry.tpot_ms, "p50"),
        value(entry.e2e_ms, "p50"),
        "" if entry.attainment is None else f"{entry.attainment.value:.1%}",
        "" if share is None else f"{share:.1%}",
        "" if acceptance is None else f"{acceptance.mean_emitted_tokens:.2f}",
    ]


def error_table(result: BenchResult) -> str:
    """Return a table of failed requests by kind of failure, each with an example message."""
    errors = result.summary.errors
    if not errors:
        return "<p>No request failed.</p>"
    examples: dict[str, str] = {}
    for row in result.measured:
        if row.error is not None and row.message:
            examples.setdefault(row.error, row.message)
    rows = [
        [_ERROR_WORDS.get(kind, kind), str(num), examples.get(kind, "")[:200]]
        for kind, num in sorted(errors.items(), key=lambda entry: -entry[1])
    ]
    return table(["what failed", "requests", "one of them"], rows)


def search_table(search: SearchReport) -> str:
    """The rates in the order in which they were tried."""
    rows = []
    for step in search.steps:
        summary = step.summary
        ttft, tpot = summary.ttft_ms, summary.tpot_ms
        rows.append(
            [
                f"{step.rate_per_s:.3g}",
                ""
                if summary.attainment is None
                else estimate_text(summary.attainment, is_share=True),
                "" if summary.goodput_per_s is None else f"{summary.goodput_per_s:.3g}",
                "" if ttft is None else figure_text(ttft.p99.value),
                "" if tpot is None else figure_text(tpot.p99.value),
                str(summary.num_failed),
                "enough" if step.is_enough else "too few",
            ]
        )
    head = ["requests/s", "attained", "goodput/s", "TTFT p99", "TPOT p99", "failed", ""]
    return table(head, rows)


def comparison_table(comparison: RunComparison) -> str:
    """The differences, those that were seen coloured."""
    first, second = comparison.first_label, comparison.second_label
    # The verdict stands beside the name, so that no screen is too narrow for it.
    head = ["", "verdict", first, second, "difference", "95 % interval", "ratio", "95 % interval"]
    cells = "".join(f'<th scope="col">{escape(one)}</th>' for one in head)
    rows = []
    for entry in comparison.differences:
        ratio = entry.ratio
        texts = [
            f"{entry.name}, {entry.unit}",
            entry.verdict,
            figure_text(entry.first),
            figure_text(entry.second),
            f"{entry.difference.value:+.4g}",
            interval_text(entry.difference),
            "" if ratio is None else f"{ratio.value:.3f}",
            "" if ratio is None else interval_text(ratio),
        ]
        rows.append(_row(texts, entry.verdict if entry.verdict in {"better", "worse"} else ""))
    return (
        f'<div class="table comparison"><table><thead><tr>{cells}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def different_table(comparison: RunComparison) -> str:
    """Return a table of the conditions that differ between the two runs."""
    if not comparison.conditions:
        return "<p>No recorded condition differs.</p>"
    rows = [[one.name, one.first, one.second] for one in comparison.conditions]
    return table(["", comparison.first_label, comparison.second_label], rows, name="conditions")


def conditions_table(result: BenchResult) -> str:
    """All that was recorded of the conditions."""
    meta: dict[str, Any] = msgspec.to_builtins(result.meta)
    meta.pop("notes")
    meta["objectives"] = msgspec.to_builtins(result.objectives)
    rows = [[name, text] for name, text in _flat(meta) if text]
    return table(["condition", ""], rows, name="conditions")


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, entry in value.items():
        title = f"{prefix}{name}".replace("_", " ")
        if isinstance(entry, Mapping):
            yield from _flat(entry, f"{prefix}{name}.")
        elif entry is not None and entry != []:
            yield title, str(entry)
