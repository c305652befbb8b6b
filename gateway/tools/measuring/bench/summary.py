"""Rows summed up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.gateway.tools.measuring.bench.results import (
    CategorySummary,
    Cost,
    DraftAcceptance,
    LoopKind,
    Objectives,
    Quantities,
    RequestRow,
    Schedule,
    Summary,
    rounded,
)
from outrider.gateway.tools.measuring.bench.statistics import (
    clustered_quantities,
    proportion_estimate,
    quantities,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrices:
    """USD for a million tokens. Cached prompt tokens cost the same unless given."""

    prompt_usd: float
    completion_usd: float
    cached_prompt_usd: float | None = None
    source: Literal["server", "given"] = "given"

    def cost_usd(self, row: RequestRow) -> float | None:
        """Return an answer's cost; None where its prompt was not counted."""
        if row.num_prompt_tokens is None:
            return None
        cached = min(row.num_cached_tokens or 0, row.num_prompt_tokens)
        cached_usd = self.prompt_usd if self.cached_prompt_usd is None else self.cached_prompt_usd
        total = (row.num_prompt_tokens - cached) * self.prompt_usd + cached * cached_usd
        return (total + row.num_completion_tokens * self.completion_usd) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTally:
    """Counts that a loop keeps in addition to the rows; see `Schedule`."""

    num_held: int = 0
    most_in_flight: int = 0
    max_in_flight: int | None = None


def summarize(
    rows: Sequence[RequestRow],
    objectives: Objectives,
    *,
    loop: LoopKind,
    prices: BenchPrices | None = None,
    tally: LoadTally | None = None,
    seed: int = 0,
) -> Summary:
    """Sum the rows up, without those of the warm-up.

    `seed`: of the bootstrap. Raises ValueError where no row was measured.
    """
    measured = [row for row in rows if not row.is_warm_up]
    if not measured:
        raise ValueError("no request was measured")
    rng = np.random.default_rng(seed)
    whole = [row for row in measured if row.is_success]
    begin_s = min(row.scheduled_s for row in measured)
    duration_s = max(max(row.ended_s for row in measured) - begin_s, 1e-9)
    num_completion = sum(row.num_completion_tokens for row in whole)
    num_prompt = _prompt_tokens(whole)
    num_attained = sum(row.attains(objectives) for row in measured)
    has_objectives = objectives.are_any
    return Summary(
        num_requests=len(measured),
        num_completed=len(whole),
        errors=dict(Counter(row.error for row in measured if row.error is not None).most_common()),
        duration_s=rounded(duration_s),
        offered_per_s=_offered_per_s(measured) if loop == "open" else None,
        completed_per_s=rounded(len(whole) / duration_s),
        prompt_tokens_per_s=None if num_prompt is None else rounded(num_prompt / duration_s),
        completion_tokens_per_s=rounded(num_completion / duration_s),
        num_prompt_tokens=num_prompt,
        num_completion_tokens=num_completion,
        token_source=_token_source(whole),
        ttft_ms=_of(rng, [row.ttft_ms for row in whole]),
        itl_ms=clustered_quantities([row.gaps_ms for row in whole], rng),
        tpot_ms=_of(rng, [row.tpot_ms for row in whole]),
        e2e_ms=_of(rng, [row.e2e_ms for row in whole]),
        sent_ttft_ms=_of(rng, [row.sent_ttft_ms for row in whole]),
        sent_e2e_ms=_of(rng, [row.sent_e2e_ms for row in whole]),
        attainment=proportion_estimate(num_attained, len(measured)) if has_objectives else None,
        goodput_per_s=rounded(num_attained / duration_s) if has_objectives else None,
        schedule=_schedule(rng, measured, loop, tally or LoadTally()),
        cost=_cost(whole, prices),
        acceptance=_acceptance(whole),
        categories=_categories(rng, measured, objectives),
        tiers=dict(Counter(row.tier for row in whole if row.tier is not None).most_common()),
    )


def _of(rng: np.random.Generator, values: Sequence[float | None]) -> Quantities | None:
    return quantities([value for value in values if value is not None], rng)


def _prompt_tokens(whole: Sequence[RequestRow]) -> int | None:
    """None where one of them is not known."""
    counts = [row.num_prompt_tokens for row in whole]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _token_source(whole: Sequence[RequestRow]) -> Literal["usage", "chunks", "mixed"]:
    sources = {row.token_source for row in whole}
    if len(sources) == 2:
        return "mixed"
    return "chunks" if sources == {"chunks"} else "usage"


def _offered_per_s(measured: Sequence[RequestRow]) -> float | None:
    """Requests per second between the first and the last that was due."""
    times = [row.scheduled_s for row in measured]
    span_s = max(times) - min(times)
    return rounded((len(times) - 1) / span_s) if span_s > 0.0 else None


def _schedule(
    rng: np.random.Generator, measured: Sequence[RequestRow], loop: LoopKind, tally: LoadTally
) -> Schedule:
    lateness = [row.lateness_ms for row in measured] if loop == "open" else []
    return Schedule(
        lateness_ms=_of(rng, lateness),
        num_held=tally.num_held,
        most_in_flight=tally.most_in_flight,
        max_in_flight=tally.max_in_flight,
    )


def _cost(whole: Sequence[RequestRow], prices: BenchPrices | None) -> Cost | None:
    """Return the reported cost, else the cost by prices; None if an answer has neither."""
    if not whole:
        return None
    told = [row.cost_usd for row in whole]
    source: Literal["reported", "server", "given"] = "reported"
    if (prices is not None and prices.source == "given") or any(usd is None for usd in told):
        if prices is None:
            return None
        told = [prices.cost_usd(row) for row in whole]
        source = prices.source
    known = [usd for usd in told if usd is not None]
    if len(known) != len(told):
        return None
    total_usd = sum(known)
    num_completion = sum(row.num_completion_tokens for row in whole)
    num_prompt = _prompt_tokens(whole)
    num_all = None if num_prompt is None else num_prompt + num_completion
    return Cost(
        total_usd=rounded(total_usd),
        usd_per_million_completion_tokens=_per_million(total_usd, num_completion),
        usd_per_million_tokens=None if num_all is None else _per_million(total_usd, num_all),
        source=source,
    )


def _per_million(total_usd: float, num_tokens: int) -> float | None:
    return rounded(1e6 * total_usd / num_tokens) if num_tokens else None


def _acceptance(rows: Sequence[RequestRow]) -> DraftAcceptance | None:
    """Return acceptance over the rows whose report has it; None if there are none."""
    told = [row for row in rows if row.num_drafted_tokens is not None]
    if not told:
        return None
    num_passes = 0.0
    num_tokens = 0
    for row in told:
        if row.mean_emitted_tokens:
            num_passes += row.num_completion_tokens / row.mean_emitted_tokens
            num_tokens += row.num_completion_tokens
    return DraftAcceptance(
        num_requests=len(told),
        num_drafted_tokens=sum(row.num_drafted_tokens or 0 for row in told),
        num_accepted_tokens=sum(row.num_accepted_tokens or 0 for row in told),
        mean_emitted_tokens=rounded(num_tokens / num_passes) if num_passes else 0.0,
    )


def _categories(
    rng: np.random.Generator, measured: Sequence[RequestRow], objectives: Objectives
) -> list[CategorySummary]:
    """Return a summary of each category, by name; empty if requests have no category."""
    by_name: dict[str, list[RequestRow]] = {}
    for row in measured:
        by_name.setdefault(row.category, []).append(row)
    if set(by_name) == {""}:
        return []
    return [_category(rng, name, by_name[name], objectives) for name in sorted(by_name)]


def _category(
    rng: np.random.Generator, name: str, rows: Sequence[RequestRow], objectives: Objectives
) -> CategorySummary:
    whole = [row for row in rows if row.is_success]
    num_attained = sum(row.attains(objectives) for row in rows)
    return CategorySummary(
        name=name,
        num_requests=len(rows),
        num_failed=len(rows) - len(whole),
        ttft_ms=_of(rng, [row.ttft_ms for row in whole]),
        tpot_ms=_of(rng, [row.tpot_ms for row in whole]),
        e2e_ms=_of(rng, [row.e2e_ms for row in whole]),
        attainment=proportion_estimate(num_attained, len(rows)) if objectives.are_any else None,
        acceptance=_acceptance(whole),
        num_completion_tokens=sum(row.num_completion_tokens for row in whole),
    )
