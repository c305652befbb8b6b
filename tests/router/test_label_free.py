"""Routing without labels: the threshold follows what the large model says of the small one."""

import math
import random
from typing import Any

import pytest

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.costs import TypicalRequest
from outrider.router.label_free import (
    AgreementModel,
    LabelFreePolicy,
    text_agreement,
    token_quantile,
)
from outrider.router.loading import RoutingOptions, load_router
from outrider.router.policy import FixedPolicy, RouteConstraints, WatchOptions
from outrider.router.watch import WatchPlan


def test_before_anything_is_judged_an_answer_agrees_as_far_as_it_is_sure() -> None:
    model = AgreementModel(0.9)
    assert model.threshold == pytest.approx(token_quantile([math.log(0.9)]), abs=0.03)
    for probability in (0.1, 0.5, 0.95):
        score = token_quantile([math.log(probability)])
        assert model.agreement(score) == pytest.approx(probability, abs=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("begins_at", "target"), [(0.3, 0.9), (0.8, 0.9), (0.6, 0.7)])
def test_the_threshold_is_found_although_mostly_weak_answers_are_judged(
    begins_at: float, target: float
) -> None:
    """The large model agrees from a score on; of the kept answers one in fifty is judged."""
    rng = random.Random(3)
    model = AgreementModel(target)
    for _ in range(4000):
        score = rng.random()
        if score < model.threshold or rng.random() < 0.02:
            agrees = 0.97 if score >= begins_at else 0.3
            model.learn(score, sum(rng.random() < agrees for _ in range(16)) / 16)
    assert model.threshold == pytest.approx(begins_at, abs=0.1)
    assert model.agreement(0.99) > 0.85
    assert model.agreement(0.0) < 0.5


def test_if_the_large_model_never_agrees_it_answers() -> None:
    model = AgreementModel(0.9)
    for number in range(400):
        model.learn((number % 100) / 100, 0.1)
    assert model.threshold > 0.95


def test_agreement_never_falls_with_the_score() -> None:
    rng = random.Random(5)
    model = AgreementModel()
    for _ in range(200):
        model.learn(rng.random(), rng.random())
    means = [model.agreement(step / 50) for step in range(51)]
    assert means == sorted(means)
    assert model.threshold_for(0.0) == 0.0
    assert model.threshold_for(2.0) == ALWAYS_LARGE


def test_a_share_for_the_large_model_is_kept_by_the_scores_alone() -> None:
    model = AgreementModel(strong_share=0.3)
    for number in range(100):
        model.saw(number / 100)
    assert model.threshold == pytest.approx(0.297)
    assert AgreementModel(strong_share=1.0).threshold == ALWAYS_LARGE
    with pytest.raises(ValueError, match="target=2"):
        AgreementModel(2.0)


def plan_of(policy: LabelFreePolicy, **constraints: Any) -> WatchPlan:
    route = policy.route("anything", RouteConstraints(**constraints))
    assert route.tier == "small"
    assert route.watch is not None
    return route.watch


def test_an_answer_is_judged_at_the_end_of_the_hold() -> None:
    policy = LabelFreePolicy()
    for logprob, action in ((-0.01, "commit"), (-2.0, "escalate")):
        watch = plan_of(policy).new_watch()
        assert watch.on_prompt(None).action == "hold"
        assert watch.on_tokens([logprob] * 15).action == "hold"
        judgement = watch.on_tokens([logprob])
        assert judgement.action == action
        assert judgement.confidence == pytest.approx(math.exp(-math.sqrt(-logprob)))


def test_what_is_judged_is_learnt() -> None:
    policy = LabelFreePolicy()
    before = policy.model.threshold
    for number in range(256):
        plan = plan_of(policy)
        assert plan.on_agreement is not None
        plan.on_agreement((number % 64) / 64, 1.0)
    assert policy.model.threshold < before - 0.2


def test_a_request_may_say_its_own_threshold_or_quality() -> None:
    policy = LabelFreePolicy()
    watch = plan_of(policy, threshold=0.1, hold_back_tokens=2).new_watch()
    assert watch.on_tokens([-2.0, -2.0]).action == "commit"
    sure = plan_of(policy, min_quality=0.99).new_watch()
    assert sure.on_tokens([-0.1] * 16).action == "escalate"


def test_the_large_model_answers_what_cannot_be_watched() -> None:
    route = LabelFreePolicy().route("", RouteConstraints(may_watch=False, min_quality=0.9))
    assert (route.tier, route.watch) == ("large", None)
    assert "no router" in route.reason


def test_a_few_kept_answers_are_explored() -> None:
    draws = iter([0.0, 0.5])
    policy = LabelFreePolicy(explore_share=0.02, draw=lambda: next(draws))
    assert [plan_of(policy).is_explored for _ in range(2)] == [True, False]


def test_while_hardly_any_answer_is_kept_only_a_few_are_begun() -> None:
    policy = LabelFreePolicy(draw=random.Random(3).random)
    for number in range(64):
        assert policy.route("").tier == "small", f"{number} are too few to tell"
        policy.model.saw(0.1)
    tiers = [policy.route("").tier for _ in range(1600)]
    assert tiers.count("small") / len(tiers) == pytest.approx(1 / 16, abs=0.02)
    route = policy.route("", RouteConstraints(threshold=0.9))
    assert route.reason == "router: no router, few small answers reach 0.90, large answers"
    assert policy.route("", RouteConstraints(threshold=0.1)).tier == "small", "these are kept"
    for _ in range(4):  # one in 16 of the latest
        policy.model.saw(0.99)
    assert {policy.route("").tier for _ in range(100)} == {"small"}


def test_while_the_large_model_nearly_agrees_answers_are_begun_to_learn_more() -> None:
    for agreement, tier in ((0.97, "small"), (0.5, "large")):
        policy = LabelFreePolicy(draw=lambda: 0.9)
        for number in range(64):
            score = 0.2 + number / 640
            assert score < policy.model.threshold, "none is kept yet"
            policy.model.saw(score)
            policy.model.learn(score, agreement)
        assert policy.route("").tier == tier


def test_what_the_operator_wants_watched_is_begun_though_hardly_any_answer_is_kept() -> None:
    always = LabelFreePolicy(watch=WatchOptions(mode="always"), draw=lambda: 0.9)
    shared = LabelFreePolicy(model=AgreementModel(strong_share=0.99), draw=lambda: 0.9)
    none = LabelFreePolicy(model=AgreementModel(strong_share=1.0), draw=lambda: 0.9)
    for policy, tier in ((always, "small"), (shared, "small"), (none, "large")):
        for _ in range(64):
            policy.model.saw(0.1)
        assert policy.route("").tier == tier


def test_a_server_without_log_probabilities_keeps_its_answers() -> None:
    """Its text alone can show that they are weak."""
    watch = plan_of(LabelFreePolicy()).new_watch()
    assert watch.on_time().action == "commit"


def test_without_a_router_there_is_a_choice_all_the_same() -> None:
    loaded = load_router(None, ("small", "large"), RoutingOptions(), TypicalRequest())
    assert isinstance(loaded.policy, LabelFreePolicy)
    assert "without a router" in loaded.summary
    off = RoutingOptions(watch=WatchOptions(mode="off"))
    assert isinstance(
        load_router(None, ("small", "large"), off, TypicalRequest()).policy, FixedPolicy
    )
    one = load_router(None, ("large",), RoutingOptions(), TypicalRequest())
    assert "one tier loaded" in one.summary


def test_scores_and_words() -> None:
    assert token_quantile([-1.0] + [0.0] * 31) == 1.0, "one token in 32 moves nothing"
    assert token_quantile([-1.0]) == pytest.approx(math.exp(-1))
    assert token_quantile([0.0]) == 1.0
    assert text_agreement("a b c", "a b c d e f") == 1.0
    assert text_agreement("a b c d", "a x c y") == 0.5
    assert text_agreement("", "a") == 0.0
