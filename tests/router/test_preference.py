"""A request's preference for time, price or quality."""

import pytest

from outrider.router.policy import FixedPolicy, Preference, RouteConstraints, RoutePolicy
from outrider.router.preference import SURE_QUALITY, PreferringPolicy
from outrider.router.words import Prefer
from tests.router.routers import scorer_that_says, table
from tests.router.test_policy import policy_of


def judged(quality: float = 0.5) -> RoutePolicy:
    return policy_of(scorer_that_says(quality, table()))


def wish(by: Prefer, best: str = "small", **more: float | bool) -> RouteConstraints:
    preference = Preference(by=by, best="small" if best == "small" else "large")
    return RouteConstraints(preference=preference, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("constraints", [RouteConstraints(), RouteConstraints(min_quality=0.8)])
@pytest.mark.parametrize("quality", [0.1, 0.5, 0.9])
def test_without_a_preference_nothing_changes(
    quality: float, constraints: RouteConstraints
) -> None:
    policy = judged(quality)
    own, other = policy.route("x", constraints), PreferringPolicy(policy=policy)
    routed = other.route("x", constraints)
    assert (routed.tier, routed.reason, routed.band) == (own.tier, own.reason, own.band)
    assert (routed.is_own, routed.watch is None) == (own.is_own, own.watch is None)


@pytest.mark.parametrize("by", ["latency", "price"])
def test_without_a_bar_the_best_tier_answers_unwatched(by: Prefer) -> None:
    policy = PreferringPolicy(policy=judged(0.1))
    for best in ("small", "large"):
        route = policy.route("x", wish(by, best))
        assert (route.tier, route.watch, route.is_own) == (best, None, False)
        assert route.reason.startswith(f"router: prefers {by}, {best} ")


def test_the_cheaper_tier_keeps_the_quality_that_is_asked_for() -> None:
    strict = wish("price", min_quality=1.0)
    assert PreferringPolicy(policy=judged(0.3)).route("x", strict).tier == "large"
    assert PreferringPolicy(policy=judged(0.3), min_quality=1.0).route("x", wish("price")).tier == (
        "large"
    )
    lax = PreferringPolicy(policy=judged(0.3), min_quality=1.0)
    assert lax.route("x", wish("price", min_quality=0.0)).tier == "small"  # the request's own word
    cheap_large = PreferringPolicy(policy=judged(0.9)).route("x", wish("price", "large"))
    assert cheap_large.tier == "large"


def test_who_wants_the_first_token_early_is_not_held_back() -> None:
    policy = PreferringPolicy(policy=judged(0.5))
    held = policy.route("x", wish("price", min_quality=0.8))
    assert held.watch is not None
    assert policy.route("x", wish("latency", min_quality=0.8)).watch is None


def test_quality_means_the_large_model_unless_the_router_is_sure() -> None:
    unsure = PreferringPolicy(policy=judged(0.99))
    assert unsure.route("x", wish("quality")).tier == "large"
    sure = PreferringPolicy(policy=judged(0.99), is_assured=True)
    same = judged(0.99).route("x", RouteConstraints(min_quality=SURE_QUALITY))
    assert sure.route("x", wish("quality")).threshold == same.threshold
    weak = PreferringPolicy(policy=judged(0.2), is_assured=True)
    assert weak.route("x", wish("quality")).tier == "large"
    assert weak.route("x", wish("quality", min_quality=0.5)).tier == "large"  # no lower bar


def test_a_policy_without_labels_keeps_its_reason() -> None:
    policy = PreferringPolicy(policy=FixedPolicy("large", "none configured"), min_quality=0.9)
    route = policy.route("x", wish("latency"))
    assert (route.tier, route.reason) == (
        "large",
        "router: prefers latency, none configured, large answers all",
    )
