"""A policy whose router weighs gains by costs, and one whose large model is busy."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.router.costs import TypicalRequest
from outrider.router.dial import Dial
from outrider.router.loading import RoutingOptions, RoutingTargetError, load_router
from outrider.router.policy import RouteConstraints, TrainedPolicy, own_setting
from tests.router.routers import scorer_that_says, seconds_worth, table

LONG = "word " * 200
WORTH = seconds_worth()


def policy(probability: float = 0.5, *, weighs: bool = True) -> TrainedPolicy:
    scorer = replace(
        scorer_that_says(probability, table(0.7, "text")), worth=WORTH if weighs else None
    )
    return TrainedPolicy(
        scorer=scorer, current_setting=lambda: own_setting(scorer), dial=Dial(table(0.7, "text"))
    )


def test_the_same_gain_is_worth_the_large_model_only_where_it_is_cheap() -> None:
    short, long = (policy().route(text) for text in ("hello", LONG))
    assert (short.tier, long.tier) == ("large", "small")
    assert short.threshold == pytest.approx(0.7)
    assert long.threshold == 0.0
    assert short.is_own
    assert long.is_own
    assert policy(weighs=False).route(LONG).tier == "large"


def test_a_route_tells_the_expected_seconds() -> None:
    expected = policy().route("hello", RouteConstraints(max_tokens=8)).expected
    assert set(expected) == {"second"}
    costs = expected["second"]
    assert (costs.small, costs.large) == pytest.approx((0.5, 5.5))
    assert costs.cascade == pytest.approx(6.0)


def test_a_busy_large_model_raises_the_bar_and_says_so() -> None:
    plain = policy(weighs=False)
    busy = plain.route("hello", RouteConstraints(busy_factor=2.0))
    assert plain.route("hello").tier == "large"
    assert (busy.tier, busy.is_busy, busy.is_own) == ("small", True, False)
    assert busy.reason.startswith("router: large model busy, small model likely right (0.50")
    slight = plain.route("hello", RouteConstraints(busy_factor=1.2))
    assert (slight.tier, slight.threshold) == ("large", pytest.approx(0.64))


@pytest.mark.parametrize("asked", [{"min_quality": 0.99}, {"threshold": 0.7}])
def test_a_request_that_names_a_quality_gets_it_in_spite_of_a_queue(
    asked: dict[str, float],
) -> None:
    route = policy(weighs=False).route("hello", RouteConstraints(busy_factor=4.0, **asked))
    assert (route.tier, route.is_busy) == ("large", False)
    assert "busy" not in route.reason


def test_without_a_watch_the_bar_stays_as_it_is() -> None:
    scorer = replace(scorer_that_says(0.5, table(0.7)), worth=WORTH)
    judge = TrainedPolicy(
        scorer=scorer, current_setting=lambda: own_setting(scorer), dial=Dial(table(0.7))
    )
    route = judge.route("hello", RouteConstraints(may_watch=False))
    assert (route.tier, route.threshold) == ("large", pytest.approx(0.7))


def test_an_autopilot_of_shares_is_refused(tmp_path: Path) -> None:
    replace(scorer_that_says(0.5, table(0.7)), worth=WORTH).save(tmp_path)
    options = RoutingOptions(autopilot=True, strong_share=0.3)
    with pytest.raises(RoutingTargetError, match="weighs gains by seconds"):
        load_router(tmp_path, ("small", "large"), options, TypicalRequest())
