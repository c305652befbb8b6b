import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    Meta,
    Objectives,
    RequestRow,
    ResultError,
    read_result,
    rounded,
    write_result,
)
from outrider.gateway.tools.measuring.bench.search import (
    SearchResult,
    SearchSettings,
    find_highest_rate,
)
from outrider.gateway.tools.measuring.bench.statistics import (
    bootstrap_mean,
    bootstrap_ratio,
    proportion_estimate,
    quantile_estimate,
)
from outrider.gateway.tools.measuring.bench.summary import BenchPrices, summarize


def row(index: int, **more: Any) -> RequestRow:
    values: dict[str, Any] = {
        "index": index,
        "scheduled_s": 1.0 * index,
        "sent_s": index + 0.1,
        "first_s": index + 0.2,
        "last_s": index + 0.5,
        "ended_s": index + 0.6,
        "gaps_ms": [100.0, 200.0],
        "num_completion_tokens": 4,
        "num_prompt_tokens": 10,
    }
    return RequestRow(**(values | more))


def test_quantile_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    num_hits = 0
    for _ in range(400):
        found = quantile_estimate(np.sort(rng.exponential(size=200)), 0.9)
        assert found.low is not None
        assert found.high is not None
        num_hits += found.low <= np.log(10.0) <= found.high
    assert num_hits >= 0.93 * 400


def test_too_few_samples_have_no_bound() -> None:
    assert quantile_estimate(np.arange(1.0, 101.0), 0.99).high is None
    found = quantile_estimate(np.arange(1.0, 101.0), 0.5)
    assert (found.value, found.low, found.high) == (50.5, 40.0, 61.0)  # Conover's table
    with pytest.raises(ValueError, match="no quantile"):
        quantile_estimate(np.asarray([]), 0.5)


def test_the_bootstrap_of_clusters_is_wider() -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(10.0, 2.0, size=50)
    samples = (centers[:, None] + rng.normal(0.0, 0.1, size=(50, 20))).ravel()
    alone = bootstrap_mean(samples, rng)
    sums = samples.reshape(50, 20).sum(axis=1)
    clustered = bootstrap_ratio(sums, np.full(50, 20.0), rng)
    assert alone.value == clustered.value
    assert alone.low is not None
    assert alone.high is not None
    assert clustered.low is not None
    assert clustered.high is not None
    assert clustered.high - clustered.low > 3 * (alone.high - alone.low)


def test_shares_have_wilsons_interval() -> None:
    found = proportion_estimate(9, 10)
    assert (found.low, found.high) == (
        pytest.approx(0.5958, abs=1e-4),
        pytest.approx(0.9821, abs=1e-4),
    )
    assert proportion_estimate(0, 10).low == 0.0
    assert proportion_estimate(10, 10).high == 1.0


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = row(3)
    assert one.ttft_ms == pytest.approx(200.0)
    assert one.sent_ttft_ms == pytest.approx(100.0)
    assert one.lateness_ms == pytest.approx(100.0)
    assert one.tpot_ms == pytest.approx(100.0)
    assert one.e2e_ms == pytest.approx(600.0)
    assert one.attains(Objectives(ttft_ms=201.0, inter_token_ms=101.0, e2e_ms=601.0))
    assert not one.attains(Objectives(ttft_ms=199.0))
    assert not one.attains(Objectives(inter_token_ms=99.0))
    assert not one.attains(Objectives(e2e_ms=599.0))
    assert not row(1, error="stall").attains(Objectives(e2e_ms=9e9))


def test_a_summary_adds_up() -> None:
    rows = [row(i, category="a" if i % 2 else "b") for i in range(10)]
    rows.append(row(10, error="stall", num_completion_tokens=2, category="a"))
    rows.append(row(11, is_warm_up=True, error="refused"))
    rows.append(row(12, first_s=12.9, last_s=13.0, ended_s=13.0, category="a"))
    found = summarize(
        rows,
        Objectives(ttft_ms=500.0),
        loop="open",
        prices=BenchPrices(prompt_usd=1.0, completion_usd=10.0),
    )
    assert (found.num_requests, found.num_completed, found.num_failed) == (12, 11, 1)
    assert found.errors == {"stall": 1}
    assert found.duration_s == pytest.approx(13.0)
    assert found.offered_per_s == pytest.approx(11 / 12, rel=1e-5)
    assert found.attainment is not None
    assert found.attainment.value == pytest.approx(10 / 12, rel=1e-5)
    assert found.goodput_per_s == pytest.approx(10 / 13, rel=1e-5)
    assert found.completion_tokens_per_s == pytest.approx(44 / 13, rel=1e-5)
    assert found.cost is not None
    assert found.cost.total_usd == pytest.approx(11 * (10 + 40) / 1e6)
    assert found.cost.usd_per_million_completion_tokens == pytest.approx(12.5)
    assert [c.name for c in found.categories] == ["a", "b"]
    assert [c.num_failed for c in found.categories] == [1, 0]
    assert found.itl_ms is not None
    assert found.itl_ms.num_samples == 22
    assert found.acceptance is None
    with pytest.raises(ValueError, match="no request"):
        summarize([row(0, is_warm_up=True)], Objectives(), loop="open")


def test_acceptance_counts_servers_that_report_it() -> None:
    told = [
        row(i, num_drafted_tokens=10, num_accepted_tokens=i, mean_emitted_tokens=2.0)
        for i in range(3)
    ]
    found = summarize([*told, row(5)], Objectives(), loop="closed").acceptance
    assert found is not None
    assert (found.num_requests, found.share) == (3, 0.1)
    assert found.mean_emitted_tokens == pytest.approx(2.0)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    rows = [row(i) for i in range(5)]
    result = BenchResult(
        meta=Meta(
            **{"url": "u", "model": "m", "started_at": "a", "ended_at": "b", "loop": "open"},  # type: ignore[arg-type]
            **{"workload": {}, "settings": {}, "request_fields": {}, "versions": {}},  # type: ignore[arg-type]
            machine="x",
        ),
        objectives=Objectives(ttft_ms=5.0),
        summary=summarize(rows, Objectives(ttft_ms=5.0), loop="open"),
        rows=rows,
    )
    path = tmp_path / "deep" / "run.json"
    write_result(result, path)
    assert read_result(path) == result
    for text, said in (
        ("{", "not a result"),
        ("{}", "not a result"),
        (path.read_text().replace("outrider.bench", "other"), "holds a"),
        (path.read_text().replace('"schema_version": 1', '"schema_version": 9'), "version 9"),
    ):
        path.write_text(text)
        with pytest.raises(ResultError, match=said):
            read_result(path)
    with pytest.raises(ResultError, match="cannot be read"):
        read_result(tmp_path / "missing.json")
    with pytest.raises(ResultError, match="cannot be written"):
        write_result(result, path / "below-a-file")


def test_rounding_is_to_significant_digits() -> None:
    assert rounded(123456.789) == 123457.0
    assert rounded(0.000123456789) == 0.000123457
    assert rounded(0.0) == 0.0


def found_rate(limit: float, settings: SearchSettings) -> SearchResult[float]:
    async def measure(rate: float) -> tuple[bool, float]:
        return rate <= limit, rate

    return asyncio.run(find_highest_rate(measure, settings))


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 100.0])
def test_a_search_ends_at_the_highest_rate(limit: float) -> None:
    found = found_rate(limit, SearchSettings(tolerance=0.05))
    assert found.best is not None
    assert limit / 1.06 <= found.best.rate_per_s <= limit
    assert found.is_bounded
    assert len(found.steps) <= 12


def test_a_search_without_an_end_says_so() -> None:
    never = found_rate(0.0, SearchSettings(lowest_per_s=0.1))
    assert never.best is None
    assert [step.rate_per_s for step in never.steps] == [1.0, 0.5, 0.25, 0.125]
    always = found_rate(1e9, SearchSettings(highest_per_s=8.0))
    assert always.best is not None
    assert (always.best.rate_per_s, always.is_bounded) == (8.0, False)
