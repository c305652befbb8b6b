"""A router's folder and the operator's target: which setting comes of it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.router.costs import TokenPrices, TypicalRequest
from outrider.router.loading import LoadedRouter, RoutingOptions, RoutingTargetError, load_router
from outrider.router.policy import FixedPolicy, RouteConstraints, TrainedPolicy
from tests.router.routers import assurance_of, scorer_that_says, table
from tests.router.tier_worlds import scorer_of

BOTH = ("small", "large")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scorer_that_says(0.45, table(), pair="aa-bb").save(tmp_path / "router")
    return tmp_path / "router"


@pytest.fixture
def bare_folder(tmp_path: Path) -> Path:
    scorer_that_says(0.45, threshold=0.4).save(tmp_path / "bare")
    return tmp_path / "bare"


def load(folder: Path, typical: TypicalRequest | None = None, **wanted: Any) -> LoadedRouter:
    options = RoutingOptions(**wanted)
    return load_router(folder, BOTH, options, typical or TypicalRequest())


def threshold_of(loaded: LoadedRouter) -> float:
    assert isinstance(loaded.policy, TrainedPolicy)
    return loaded.policy.current_setting().threshold


def test_without_a_target_the_routers_own_choice_holds(folder: Path) -> None:
    loaded = load(folder)
    assert threshold_of(loaded) == 0.5
    assert loaded.pair == "aa-bb"
    assert loaded.guard is not None
    assert loaded.guard.numbers().expected_share == 0.5


@pytest.mark.parametrize(
    ("wanted", "threshold"),
    [
        ({"strong_share": 0.25}, 0.25),
        ({"quality": 0.8}, 0.4),  # (0.6 + 0.3 * 0.4) / 0.9
        ({"threshold": 0.77}, 0.77),
    ],
)
def test_targets(folder: Path, wanted: dict[str, float], threshold: float) -> None:
    assert threshold_of(load(folder, **wanted)) == pytest.approx(threshold)


def test_a_mean_cost_follows_the_requests_lengths(folder: Path) -> None:
    prices = {
        "small": TokenPrices(prompt=0.0, cached_prompt=0.0, completion=1.0),
        "large": TokenPrices(prompt=0.0, cached_prompt=0.0, completion=10.0),
    }
    typical = TypicalRequest()
    # 200 tokens: small 200, large 2000 micro-dollars, 16 more where small begins.
    loaded = load(folder, typical, max_cost_usd=1.1e-3, prices=prices)
    share = (1100 - 200) / (2000 + 16 - 200)
    assert threshold_of(loaded) == pytest.approx(share, abs=1e-6)
    for _ in range(300):
        typical.num_completion_tokens.add(1000)
    later = [threshold_of(loaded) for _ in range(65)]
    assert later[0] == pytest.approx(share, abs=1e-6)
    assert later[-1] < 0.05


@pytest.mark.parametrize(
    "wanted",
    [
        {"strong_share": 0.3},
        {"quality": 0.9},
        {"autopilot": True},
        {
            "max_cost_usd": 1.0,
            "prices": dict.fromkeys(
                BOTH, TokenPrices(prompt=1.0, cached_prompt=1.0, completion=1.0)
            ),
        },
    ],
)
def test_a_router_without_a_table_says_what_it_lacks(
    bare_folder: Path, wanted: dict[str, object]
) -> None:
    with pytest.raises(RoutingTargetError, match="calibrat"):
        load(bare_folder, **wanted)


def test_an_autopilot_works_without_a_table_once_it_knows_the_share(bare_folder: Path) -> None:
    loaded = load(bare_folder, autopilot=True, strong_share=0.3)
    assert threshold_of(loaded) == 0.4
    assert loaded.guard is not None
    assert loaded.guard.numbers().expected_share is None


@pytest.mark.parametrize(
    ("wanted", "band"),
    [
        ({"band_low": 0.1}, (0.1, 0.7)),
        ({"band_high": 0.9}, (0.3, 0.9)),
        ({"band_low": 0.2, "band_high": 0.4, "threshold": 0.6}, (0.2, 0.4)),
        ({"band_high": 0.1}, (0.1, 0.1)),  # above the calibrated low end there is nothing left
    ],
)
def test_a_band_by_hand(folder: Path, wanted: dict[str, float], band: tuple[float, float]) -> None:
    loaded = load(folder, **wanted)
    assert isinstance(loaded.policy, TrainedPolicy)
    setting = loaded.policy.current_setting()
    assert setting.band == pytest.approx(band)
    assert setting.threshold == wanted.get("threshold", 0.5)
    assert setting.strong_share is None


def test_watched_answers_reach_the_guard(folder: Path) -> None:
    loaded = load(folder)
    plan = loaded.policy.route("x").watch
    assert plan is not None
    plan.new_watch().on_end()
    assert loaded.guard is not None
    numbers = loaded.guard.numbers()
    assert (numbers.num_outcomes, numbers.strong_share) == (1, 1.0)
    other = loaded.policy.route("x", RouteConstraints(min_quality=0.8)).watch
    assert other is not None
    other.new_watch().on_end()
    assert loaded.guard.numbers().num_outcomes == 1


def test_one_tier_has_no_choice_and_says_that_a_target_is_idle(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load_router(folder, ("small",), RoutingOptions(strong_share=0.2), TypicalRequest())
    assert isinstance(loaded.policy, FixedPolicy)
    assert loaded.guard is None
    assert "no effect" in caplog.text


def test_the_quality_target_takes_what_is_assured(tmp_path: Path) -> None:
    measured = replace(table(), quality_deciles=(1.0,) * 11)
    scorer_that_says(0.5, measured).with_assurance(assurance_of(0.9, "int8")).save(tmp_path)
    loaded = load(tmp_path, quality=0.9)
    assert isinstance(loaded.policy, TrainedPolicy)
    assert loaded.assured is not None
    assert loaded.policy.current_setting().strong_share == 0.5
    assert load(tmp_path, quality=0.91).policy.route("x").tier == "large"
    unwatched = loaded.policy.route("x", RouteConstraints(may_watch=False))
    assert (unwatched.tier, unwatched.threshold) == ("small", 0.5)
    loaded.assured.use("int4")
    assert loaded.policy.route("x").tier == "large"
    assert load(tmp_path).policy.route("x").band == table().chosen.band  # no target, no change


def test_a_router_of_more_tiers_is_for_an_alias(tmp_path: Path) -> None:
    scorer_of((0.4, 0.6, 0.8)).save(tmp_path)
    with pytest.raises(RoutingTargetError, match="mini, mid, big, and auto a small and a large"):
        load_router(tmp_path, ("small", "large"), RoutingOptions(), TypicalRequest())
