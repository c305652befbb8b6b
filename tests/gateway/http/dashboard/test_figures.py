"""Figures of the live page against plain sums over the same requests."""

import math

import numpy as np
import pytest

from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.http.dashboard.figures import CELL_S, figures
from outrider.gateway.http.dashboard.recent import WINDOW_S, RecentOutcomes
from outrider.gateway.settings.slo import SloClassSettings
from tests.gateway.http.dashboard.outcomes import outcome
from tests.gateway.waiting import HandClock

CLASSES = {
    "short-chat": SloClassSettings(ttft_ms=1000.0, inter_token_ms=100.0),
    "batch": SloClassSettings(is_batch=True),
}


def nearest_rank(values: list[float], quantile: float) -> float:
    return sorted(values)[max(0, math.ceil(quantile * len(values)) - 1)]


def test_quantiles_are_those_of_the_requests() -> None:
    clock = HandClock(10_000.0)
    recent = RecentOutcomes(clock=clock)
    ttfts = [float(t) for t in np.random.default_rng(3).gamma(2.0, 0.1, 200)]
    clock.now_s += 20
    for ttft_s in ttfts:
        recent.observe(outcome(ttft_s=ttft_s))
    recent.observe(outcome(ttft_s=None, ending="failed", inter_token_s=None, duration_s=99.0))
    latency = figures(recent.rows(), CLASSES, shows_costs=True).latency
    assert latency.ttft_ms.num == 200
    for quantile, found in ((0.5, latency.ttft_ms.p50), (0.95, latency.ttft_ms.p95)):
        assert found == pytest.approx(1000 * nearest_rank(ttfts, quantile))
    assert latency.ttft_ms.p99 == pytest.approx(1000 * nearest_rank(ttfts, 0.99))
    assert latency.e2e_ms.p99 == pytest.approx(500), "what failed has no end to measure"


def test_rates_shares_and_money() -> None:
    clock = HandClock(10_000.0)
    recent = RecentOutcomes(clock=clock)
    clock.now_s += 40.0
    for tier in ("small", "small", "large", "cloud"):
        recent.observe(outcome(tier=tier))
    recent.observe(outcome(ttft_s=3.0))
    recent.observe(outcome(ending="cancelled", tier=""))
    recent.observe(outcome(ending="refused", status=429, error_code="queue_full", tier=""))
    done = figures(recent.rows(), CLASSES, shows_costs=True)
    told = done.requests
    assert (told.num, told.num_answered, told.num_cancelled, told.num_refused) == (7, 5, 1, 1)
    assert told.per_s == pytest.approx(7 / 40)
    assert told.goodput == pytest.approx(4 / 40)
    assert told.tokens_per_s == pytest.approx(70 / 40)
    assert told.cost_usd_per_s == pytest.approx(7 * 0.002 / 40)
    charged = figures(recent.rows(), CLASSES, shows_costs=False).requests
    assert charged.cost_usd_per_s == pytest.approx(7 * 0.003 / 40)
    assert {tier.name: tier.share for tier in done.tiers} == {
        "small": 0.4,
        "large": 0.4,
        "cloud": 0.2,
    }
    short, batch = done.classes
    assert (short.num, short.num_attained, short.attainment) == (6, 4, pytest.approx(4 / 6))
    assert (short.ttft_ms, batch.ttft_ms, batch.attainment) == (1000, None, None)


def test_each_cell_has_its_own_requests() -> None:
    clock = HandClock(10_000.0)
    recent = RecentOutcomes(clock=clock)
    for ttft_s in (0.3, 0.1, 0.2):
        recent.observe(outcome(ttft_s=ttft_s))
    clock.now_s += 2 * CELL_S
    recent.observe(outcome(ttft_s=0.9, slo_ttft_s=0.5))
    clock.now_s += 1.0
    series = figures(recent.rows(), CLASSES, shows_costs=True).series
    assert len(series.age_s) == len(series.goodput) == WINDOW_S / CELL_S
    assert series.age_s[-1] == pytest.approx(-4.0), "the cell that has begun"
    assert series.age_s[-3] == pytest.approx(6.0)
    assert series.ttft_ms.p50[-4:] == [None, pytest.approx(200), None, pytest.approx(900)]
    assert series.ttft_ms.p99[-3] == pytest.approx(300)
    assert series.requests_per_s[-3:] == [pytest.approx(3 / CELL_S), 0, pytest.approx(1.0)]
    assert series.goodput[-3:] == [pytest.approx(3 / CELL_S), 0, 0]
    assert series.tokens_per_s[-3] == pytest.approx(30 / CELL_S)


def test_outcomes_older_than_the_window_are_dropped() -> None:
    clock = HandClock(10_000.0)
    recent = RecentOutcomes(clock=clock)
    recent.observe(outcome())
    clock.now_s += WINDOW_S + 1
    recent.observe(outcome())
    rows = recent.rows()
    assert len(rows) == 1
    assert rows.window_s == WINDOW_S


def test_a_full_ring_says_that_its_window_is_shorter() -> None:
    clock = HandClock(10_000.0)
    recent = RecentOutcomes(clock=clock, capacity=8)
    clock.now_s += 100
    for number in range(20):
        clock.now_s += 1.0
        recent.observe(outcome(ttft_s=number + 1.0))
    rows = recent.rows()
    assert rows["ttft_s"].tolist() == [float(number) for number in range(13, 21)]
    assert rows.window_s == pytest.approx(7.0)


def test_a_tenant_sees_its_own_only() -> None:
    recent = RecentOutcomes(clock=HandClock(10_000.0))
    made: list[RequestOutcome] = [
        outcome(key_id="key-a"),
        outcome(key_id="key-a", team_id="team-1"),
        outcome(key_id="key-b", team_id="team-1"),
        outcome(key_id="key-c"),
    ]
    for one in made:
        recent.observe(one)
    assert len(recent.rows()) == 4
    assert len(recent.rows("key-a")) == 1
    assert len(recent.rows("team-1")) == 2
    assert len(recent.rows("key-b")) == 0, "its requests are its team's"


def test_names_without_end_do_not_fill_the_memory() -> None:
    recent = RecentOutcomes(clock=HandClock(10_000.0))
    for number in range(1000):
        recent.observe(outcome(tier=f"tier-{number}"))
    rows = recent.rows()
    assert len(rows.tiers) == 256
    assert rows.tiers[rows["tier"][3]] == "tier-3"
    assert rows.tiers[rows["tier"][999]] == "none"


def test_nothing_yet() -> None:
    done = figures(RecentOutcomes(clock=HandClock(10_000.0)).rows(), CLASSES, shows_costs=True)
    assert done.requests.num == 0
    assert done.latency.ttft_ms.p50 is None
    assert done.tiers == []
    assert [one.name for one in done.classes] == ["short-chat", "batch"]
