from pathlib import Path

import numpy as np
import pytest

from router.estimator import TrainedRouter
from router.features import FeatureConfig
from router.policy import FixedPolicy, RoutePolicy, ThresholdPolicy, load_policy
from router.scorer import RouterFileError, RouterScorer

SMALL = FeatureConfig(num_char_features=64, num_word_features=64)


def scorer_that_says(probability: float) -> RouterScorer:
    return RouterScorer(
        features=SMALL,
        weight=np.zeros((1, SMALL.num_features)),
        bias=np.array([np.log(probability / (1 - probability))]),
        threshold=0.5,
    )


@pytest.mark.parametrize(
    ("probability", "tier", "reason"),
    [
        (0.93, "small", "router: small model likely right (0.93 >= 0.72)"),
        (0.41, "large", "router: small model likely too weak (0.41 < 0.72)"),
    ],
)
def test_threshold_decides_and_explains(probability: float, tier: str, reason: str) -> None:
    route = ThresholdPolicy(scorer_that_says(probability), 0.72).route("anything")
    assert (route.tier, route.reason) == (tier, reason)
    assert route.quality == pytest.approx(probability)


def test_the_threshold_itself_is_good_enough() -> None:
    scorer = scorer_that_says(0.5)
    assert ThresholdPolicy(scorer, 0.5).route("x").tier == "small"
    assert ThresholdPolicy(scorer, 0.0).route("x").tier == "small"


def test_a_threshold_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=1\.5"):
        ThresholdPolicy(scorer_that_says(0.5), 1.5)


def test_a_trained_router_sends_easy_to_small_and_hard_to_large(router_folder: Path) -> None:
    policy = load_policy(router_folder)
    assert policy.route("What is 3 + 4?").tier == "small"
    hard = policy.route("What is 53412 + 91283?")
    assert hard.tier == "large"
    assert hard.reason.isascii()
    assert "\n" not in hard.reason


@pytest.mark.parametrize("text", ["", "x" * 100_000, "\ud800", "\x00\n\r"])
def test_no_string_makes_it_fail(router_folder: Path, text: str) -> None:
    assert load_policy(router_folder).route(text).tier in ("small", "large")


def test_load_policy_says_why_there_is_no_choice(router_folder: Path) -> None:
    cases: tuple[tuple[RoutePolicy, str, str], ...] = (
        (load_policy(None), "large", "router: none configured, large answers all"),
        (
            load_policy(router_folder, tiers=("small",)),
            "small",
            "router: one tier loaded, small answers all",
        ),
        (
            load_policy(None, tiers=("large",)),
            "large",
            "router: one tier loaded, large answers all",
        ),
    )
    for policy, tier, reason in cases:
        assert isinstance(policy, FixedPolicy)
        route = policy.route("x")
        assert (route.tier, route.reason, route.quality) == (tier, reason, None)


def test_load_policy_takes_the_trained_threshold_unless_told(
    router_folder: Path, trained: TrainedRouter
) -> None:
    default, told = load_policy(router_folder), load_policy(router_folder, threshold=0.0)
    assert isinstance(default, ThresholdPolicy)
    assert isinstance(told, ThresholdPolicy)
    assert default.threshold == trained.scorer.threshold
    assert told.threshold == 0.0
    assert told.route("What is 53412 + 91283?").tier == "small"


def test_load_policy_refuses_what_is_not_a_router(tmp_path: Path) -> None:
    with pytest.raises(RouterFileError):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="no tier is loaded"):
        load_policy(None, tiers=())
