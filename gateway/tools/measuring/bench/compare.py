"""`outrider bench --compare`: what differs between two runs, how surely, and under what conditions.

Intervals are 95 % percentile intervals of a block bootstrap (`statistics`). Of a paired run both
sides are drawn with the same indexes, so that what a request brings with it cancels out. Shares
without any variation have Newcombe's interval (1998, method 10) instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    IntervalEstimate,
    RequestRow,
    ResultError,
    rounded,
)
from outrider.gateway.tools.measuring.bench.statistics import (
    NUM_RESAMPLES,
    Indexes,
    Samples,
    Side,
    Statistic,
    acceptance,
    block_indexes,
    gap_quantile,
    goodput,
    mean_of,
    percentile_estimate,
    quantile_of,
    ratio_of,
    share_attained,
    share_difference,
    share_failed,
    side_of,
    token_rate,
)

Better = Literal["lower", "higher"]
DifferenceVerdict = Literal["better", "worse", "no difference seen", "too few"]

_MIN_SAMPLES: Final = 8
_MIN_BEYOND: Final = 5
"""So many samples must lie beyond a quantile before its interval means anything."""
_QUANTILES: Final = (0.5, 0.95, 0.99)
_LATENCIES: Final = (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
# What one usually compares; every other condition should be the same on both sides.
_SUBJECTS: Final = ("url", "model", "arm", "request_fields", "served_by", "commit", "versions")
_IGNORED: Final = ("started_at", "ended_at", "notes")
# It only names texts that are made, so that no run finds them in a cache.
_SALT: Final = "settings.salt"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on both sides. The intervals are None where there are too few samples."""

    name: str
    unit: str
    better: Better
    first: float
    second: float
    difference: IntervalEstimate
    """Second minus first."""
    ratio: IntervalEstimate | None
    """Second over first."""
    verdict: DifferenceVerdict
    """About the second run."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not the same on both sides. `is_subject`: likely what is compared."""

    name: str
    first: str
    second: str
    is_subject: bool


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs side by side. `num_pairs`: 0 where they are not paired.

    `share_faster`: of the pairs, in how many the second answered sooner; None without pairs.
    """

    kind: str = "outrider.bench.comparison"
    first_label: str
    second_label: str
    num_first: int
    num_second: int
    num_pairs: int
    share_faster: IntervalEstimate | None
    differences: list[Difference]
    conditions: list[Condition]
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A compared figure. `latency`: latency that a request must have to be counted; empty: all."""

    name: str
    unit: str
    better: Better
    statistic: Statistic
    latency: str = ""
    min_samples: int = _MIN_SAMPLES

    def num_samples(self, side: Side) -> int:
        """Return the number of requests that the figure is computed from."""
        if not self.latency:
            return side.num_requests
        return int(np.isfinite(side.latencies[self.latency]).sum())


# ---- the comparison ---------------------------------------------------------------------------


def compare_results(
    first: BenchResult, second: BenchResult, *, seed: int = 0, is_paired: bool | None = None
) -> RunComparison:
    """Every figure that both runs have. Raises ResultError where one has no requests, or where
    `is_paired` and no request is in both.

    `is_paired` None: where both name an arm and have the same requests.
    """
    rows = (_ordered(first), _ordered(second))
    for result, its_rows in zip((first, second), rows, strict=True):
        if not its_rows:
            raise ResultError(f"the run of {result.meta.url} has no measured requests to compare")
    labels = _labels(first, second)
    if is_paired is None:
        arms = (first.meta.arm, second.meta.arm)
        is_paired = all(arms) and _indexes(rows[0]) == _indexes(rows[1])
    if is_paired:
        rows = _pairs(*rows)
        if not rows[0]:
            raise ResultError("the runs have no request in common, so they are not a pair")
    sides = (side_of(first, rows[0]), side_of(second, rows[1]))
    rng = np.random.default_rng(seed)
    draws = _draws(sides, rng, is_paired=is_paired)
    differences = [
        difference
        for figure in _figures(first, second)
        if (difference := _difference(figure, sides, draws)) is not None
    ]
    conditions = different_conditions(first, second)
    return RunComparison(
        first_label=labels[0],
        second_label=labels[1],
        num_first=len(rows[0]),
        num_second=len(rows[1]),
        num_pairs=len(rows[0]) if is_paired else 0,
        share_faster=_share_faster(sides, draws[0]) if is_paired else None,
        differences=differences,
        conditions=conditions,
        notes=_notes(first, second, conditions, is_paired=is_paired),
    )


def different_conditions(first: BenchResult, second: BenchResult) -> list[Condition]:
    """Return differences in settings, workload, machine, versions and objectives."""
    sides = [_flat(msgspec.to_builtins(one.meta)) for one in (first, second)]
    for side, one in zip(sides, (first, second), strict=True):
        side |= _flat({"objectives": msgspec.to_builtins(one.objectives)})
        side["tokens counted by"] = one.summary.token_source
    names = sorted(sides[0].keys() | sides[1].keys())
    found = []
    for name in names:
        texts = [side.get(name, "not said") for side in sides]
        is_ignored = name == _SALT or name.partition(".")[0] in _IGNORED
        if is_ignored or texts[0] == texts[1]:
            continue
        is_subject = name.partition(".")[0] in _SUBJECTS
        found.append(Condition(name=name, first=texts[0], second=texts[1], is_subject=is_subject))
    return found


def write_comparison(comparison: RunComparison, path: Path) -> None:
    """Write it as JSON. Raises ResultError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


# ---- samples ----------------------------------------------------------------------------------


def _ordered(result: BenchResult) -> list[RequestRow]:
    return sorted(result.measured, key=lambda row: (row.scheduled_s, row.index))


def _indexes(rows: Sequence[RequestRow]) -> set[int]:
    return {row.index for row in rows}


def _pairs(
    first: Sequence[RequestRow], second: Sequence[RequestRow]
) -> tuple[list[RequestRow], list[RequestRow]]:
    """The requests that both sides have, in the first one's order."""
    others = {row.index: row for row in second}
    kept = [row for row in first if row.index in others]
    return kept, [others[row.index] for row in kept]


def _draws(
    sides: tuple[Side, Side], rng: np.random.Generator, *, is_paired: bool
) -> tuple[Indexes, Indexes]:
    first = block_indexes(sides[0].num_requests, NUM_RESAMPLES, rng)
    return first, first if is_paired else block_indexes(sides[1].num_requests, NUM_RESAMPLES, rng)


# ---- figures ----------------------------------------------------------------------------------


def _figures(first: BenchResult, second: BenchResult) -> list[_Figure]:
    figures = [figure for name, title in _LATENCIES for figure in _latency_figures(name, title)]
    figures += [
        _Figure(
            name=f"ITL p{share * 100:g}",
            unit="ms",
            better="lower",
            statistic=gap_quantile(share),
        )
        for share in (0.5, 0.99)
    ]
    if first.objectives.are_any and first.objectives == second.objectives:
        figures += [
            _Figure(name="attainment", unit="share", better="higher", statistic=share_attained),
            _Figure(name="goodput", unit="requests/s", better="higher", statistic=goodput),
        ]
    return [
        *figures,
        _Figure(name="tokens per second", unit="tokens/s", better="higher", statistic=token_rate),
        _Figure(name="failed", unit="share", better="lower", statistic=share_failed),
        _Figure(name="accepted drafts", unit="share", better="higher", statistic=acceptance),
    ]


def _latency_figures(name: str, title: str) -> list[_Figure]:
    mean = _Figure(
        name=f"{title} mean", unit="ms", better="lower", statistic=mean_of(name), latency=name
    )
    quantiles = [
        _Figure(
            name=f"{title} p{share * 100:g}",
            unit="ms",
            better="lower",
            statistic=quantile_of(name, share),
            latency=name,
            min_samples=max(_MIN_SAMPLES, round(_MIN_BEYOND / (1 - share))),
        )
        for share in _QUANTILES
    ]
    return [mean, *quantiles]


def _difference(
    figure: _Figure, sides: tuple[Side, Side], draws: tuple[Indexes, Indexes]
) -> Difference | None:
    """None where a side has no such figure."""
    whole = [np.arange(side.num_requests)[None, :] for side in sides]
    first, second = (
        float(figure.statistic(side, all_rows)[0])
        for side, all_rows in zip(sides, whole, strict=True)
    )
    if not (np.isfinite(first) and np.isfinite(second)):
        return None
    drawn: tuple[Samples, Samples] | None = None
    if min(figure.num_samples(side) for side in sides) >= figure.min_samples:
        drawn = (figure.statistic(sides[0], draws[0]), figure.statistic(sides[1], draws[1]))
    difference = percentile_estimate(second - first, None if drawn is None else drawn[1] - drawn[0])
    if difference.low == difference.high and figure.statistic in (share_attained, share_failed):
        difference = share_difference(first, second, [side.num_requests for side in sides])
    ratio = None
    if first > 0:
        ratios = None if drawn is None or drawn[0].min() <= 0 else drawn[1] / drawn[0]
        ratio = percentile_estimate(second / first, ratios)
    return Difference(
        name=figure.name,
        unit=figure.unit,
        better=figure.better,
        first=rounded(first),
        second=rounded(second),
        difference=difference,
        ratio=ratio,
        verdict=_verdict(difference, figure.better),
    )


def _verdict(difference: IntervalEstimate, better: Better) -> DifferenceVerdict:
    if difference.low is None or difference.high is None:
        return "too few"
    if difference.low <= 0.0 <= difference.high:
        return "no difference seen"
    return "better" if (difference.high < 0.0) == (better == "lower") else "worse"


def _share_faster(sides: tuple[Side, Side], draws: Indexes) -> IntervalEstimate | None:
    first, second = (side.latencies["e2e"] for side in sides)
    known = np.isfinite(first) & np.isfinite(second)
    if not known.any():
        return None
    faster = (second < first) & known
    weights = known.astype(np.float64)
    drawn = ratio_of(faster.astype(np.float64), weights, draws)
    has_enough = known.sum() >= _MIN_SAMPLES
    return percentile_estimate(float(faster.sum() / known.sum()), drawn if has_enough else None)


# ---- words ------------------------------------------------------------------------------------


def _labels(first: BenchResult, second: BenchResult) -> tuple[str, str]:
    arms = (first.meta.arm, second.meta.arm)
    return (arms[0] or "A", arms[1] or "B") if arms[0] != arms[1] else ("A", "B")


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Names with dots, and values as text."""
    found: dict[str, str] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = "none" if entry is None else str(entry)
    return found


def _notes(
    first: BenchResult,
    second: BenchResult,
    conditions: Sequence[Condition],
    *,
    is_paired: bool,
) -> list[str]:
    notes = []
    others = [condition.name for condition in conditions if not condition.is_subject]
    if others:
        notes.append(
            f"The runs were made under different conditions ({', '.join(others)}), which may "
            "explain the differences."
        )
    if first.objectives != second.objectives:
        notes.append("Their objectives differ, so attainment and goodput are not compared.")
    if "chunks" in {first.summary.token_source, second.summary.token_source}:
        notes.append(
            "Tokens of at least one run were counted as chunks, since its server sent no usage: "
            "figures per token are those of chunks."
        )
    failed = [one.summary.num_failed for one in (first, second)]
    if any(failed):
        notes.append(
            f"{failed[0]} and {failed[1]} requests failed; latencies are of those that did not."
        )
    if not is_paired:
        notes.append(
            "The runs are apart in time: whatever else the machines did then is in the difference. "
            "A paired run (--ab) takes turns."
        )
    notes.append(
        "Each interval holds with 95 % by itself: of twenty figures without any difference, about "
        "one is expected to show one."
    )
    return notes
