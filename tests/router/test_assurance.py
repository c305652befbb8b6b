"""What a router assures: qualities that are kept as often as it says, and bands that hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.router.assurance import (
    AssuredPoint,
    AssuredStage,
    LiveAssurance,
    assure,
    interval,
    is_broken,
    kept_quality,
)
from outrider.router.calibration import ALWAYS_LARGE, StageRows, measure
from outrider.router.familiarity import Familiarity
from outrider.router.features import FloatRows
from outrider.router.label_free import LabelFreePolicy
from outrider.router.policy import RouteConstraints, TrainedPolicy, own_setting
from outrider.router.scorer import RouterScorer
from tests.router.routers import SMALL, assurance_of, scorer_that_says, table

CONFIDENCE = 0.9


def world(num_prompts: int, rng: np.random.Generator) -> StageRows:
    """Prompts whose qualities mislead: the router is too sure of itself, and not monotone."""
    text = rng.random(num_prompts)
    last = np.clip(text + rng.normal(0.0, 0.2, num_prompts), 0.0, 1.0)
    right = 0.35 + 0.5 * last**2 + 0.1 * np.sin(12 * last)
    weak = (rng.random(num_prompts) < right).astype(np.float64)
    strong = (rng.random(num_prompts) < 0.85).astype(np.float64)
    return StageRows(
        text=text,
        prompt=last,
        answer=None,
        weak=weak,
        strong=strong,
        text_right=text,
        last_right=last,
    )


@pytest.mark.parametrize("share_right", [0.7, 0.8, 0.95])
def test_a_quality_is_kept_as_often_as_it_says(share_right: float) -> None:
    rng = np.random.default_rng(1)
    num_trials, num_wrong, lowest = 400, 0, 1.0
    for _ in range(num_trials):
        strong = (rng.random(150) < 0.8).astype(np.float64)
        routed = (rng.random(150) < share_right).astype(np.float64)
        found = kept_quality(routed, strong, CONFIDENCE)
        num_wrong += found > share_right / 0.8
        lowest = min(lowest, found)
    assert num_wrong <= num_trials * 0.1 + 2 * np.sqrt(num_trials * 0.09)
    assert lowest > 0.5  # it says something


@pytest.mark.slow
def test_the_chosen_setting_keeps_its_quality_on_prompts_to_come() -> None:
    """A law: of 150 routers calibrated on 400 prompts each, at most one in ten breaks its word."""
    rng = np.random.default_rng(2)
    later = world(100_000, rng)
    num_trials = 150
    broken = dict.fromkeys(((q, w) for q in (0.8, 0.9, 0.95) for w in (False, True)), 0)
    for _ in range(num_trials):
        assurance = assure(world(400, rng), confidence=CONFIDENCE)
        for quality, may_watch in broken:
            setting = assurance.stage(may_watch=may_watch).setting(quality)
            rows = later if may_watch else replace(later, prompt=later.text)
            kept = measure(rows, setting.threshold, setting.band).relative_accuracy
            broken[quality, may_watch] += kept < quality
    most = num_trials * 0.1 + 2 * np.sqrt(num_trials * 0.09)
    assert max(broken.values()) <= most, broken


def test_more_is_kept_with_more_prompts_and_no_more_than_is_true() -> None:
    rng = np.random.default_rng(3)
    later = world(100_000, rng)
    stages = [assure(world(n, rng)).stages[-1] for n in (400, 4000)]
    shares = [stage.setting(0.9).strong_share or 0.0 for stage in stages]
    assert shares[1] < shares[0] < 1.0
    setting = stages[1].setting(0.9)
    assert measure(later, setting.threshold, setting.band).relative_accuracy < 0.93


def test_a_higher_quality_never_takes_less_of_the_large_model() -> None:
    stage = assure(world(500, np.random.default_rng(4))).stages[-1]
    qualities = np.linspace(0.0, 1.0, 41).tolist()
    shares = [stage.setting(quality).strong_share or 0.0 for quality in qualities]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert stage.setting(1.0).threshold == ALWAYS_LARGE


def test_the_first_setting_that_fails_ends_the_sequence() -> None:
    """The surest prompts are lost, the next ones won: what comes behind a loss is not believed."""
    text = np.linspace(0.0, 1.0, 1000)
    is_lost, is_won = text > 0.8, (text > 0.3) & (text <= 0.8)
    strong = np.where(is_won, 0.0, 1.0)
    rows = StageRows(text=text, prompt=text, answer=None, weak=1.0 - is_lost, strong=strong)
    stage = assure(rows).stages[0]
    qualities = [point.quality for point in stage.points]
    assert qualities == sorted(qualities, reverse=True)
    assert stage.setting(0.9).strong_share == pytest.approx(0.95, abs=0.05)


def test_the_bands_of_a_group_hold_its_share() -> None:
    rng = np.random.default_rng(5)
    num_missed = 0
    for _ in range(300):
        share = rng.random()
        low, high = interval((rng.random(40) < share).astype(np.float64))
        num_missed += not low <= share <= high
    assert num_missed <= 30
    assert interval(np.ones(20))[1] == pytest.approx(1.0)
    assert interval(np.zeros(20))[0] == pytest.approx(0.0)
    assert interval(np.ones(1000))[0] > 0.99


def test_the_band_follows_the_estimate() -> None:
    stage = assure(world(5000, np.random.default_rng(6))).stages[-1]
    assert len(stage.groups) == 10
    low, high = stage.small_right(0.02), stage.small_right(0.98)
    assert low[1] < high[0]
    assert stage.small_right(-1.0) == (stage.groups[0].low, stage.groups[0].high)


def test_a_promise_is_broken_only_by_evidence() -> None:
    rng = np.random.default_rng(7)
    strong = (rng.random(800) < 0.9).astype(np.float64)
    assert not is_broken(strong, strong, 1.0)
    worse = strong * (rng.random(800) < 0.8)
    assert is_broken(worse, strong, 0.95)
    assert not is_broken(worse, strong, 0.75)
    assert not is_broken(worse[:5], strong[:5], 0.95)


def policy_of(
    scorer: RouterScorer, assured: LiveAssurance, otherwise: LabelFreePolicy | None = None
) -> TrainedPolicy:
    setting = own_setting(scorer)
    return TrainedPolicy(
        scorer=scorer, current_setting=lambda: setting, assured=assured, otherwise=otherwise
    )


@pytest.mark.parametrize(("wanted", "tier"), [(0.9, "small"), (0.96, "large")])
def test_min_quality_takes_the_setting_that_is_assured(wanted: float, tier: str) -> None:
    policy = policy_of(scorer_that_says(0.7, table()), LiveAssurance([assurance_of(0.95)]))
    route = policy.route("x", RouteConstraints(min_quality=wanted))
    assert (route.tier, route.is_own, route.small_right) == (tier, False, (0.6, 0.9))
    own = policy_of(scorer_that_says(0.7, table()), LiveAssurance([assurance_of(0.0)]))
    assert own.route("x").band == table().chosen.band  # nothing else changes


def test_a_conversation_does_not_loosen_what_is_assured() -> None:
    policy = policy_of(scorer_that_says(0.45), LiveAssurance([assurance_of(0.95)]))

    def tier(current: str, factor: float) -> str:
        constraints = RouteConstraints(
            min_quality=0.9, current="small" if current == "small" else "large", gain_factor=factor
        )
        return policy.route("x", constraints).tier

    assert tier("small", 3.0) == "large"
    sure = policy_of(scorer_that_says(0.6), LiveAssurance([assurance_of(0.95)]))
    stays = RouteConstraints(min_quality=0.9, current="large", gain_factor=0.0)
    assert sure.route("x", stays).tier == "large"


def test_what_is_unlike_the_training_is_not_assured() -> None:
    scorer = replace(
        scorer_that_says(0.9, table()), familiarity=Familiarity.of(["What is 2 + 2?"] * 3, SMALL)
    )
    policy = policy_of(scorer, LiveAssurance([assurance_of(0.95)]), LabelFreePolicy())
    assert policy.route("What is 2 + 2?", RouteConstraints(min_quality=0.5)).tier == "small"
    foreign = "Ägypten und die Pharaonen"
    route = policy.route(foreign, RouteConstraints(min_quality=0.5))
    assert (route.tier, route.watch) == ("large", None)
    assert "unlike the router's training" in route.reason
    assert policy.route(foreign).watch is not None  # without a bar as before


def test_another_width_of_weights_is_not_assured() -> None:
    live = LiveAssurance([assurance_of(0.95, "bfloat16"), assurance_of(0.6, "int8")])
    policy = policy_of(scorer_that_says(0.7, table()), live)
    ask = RouteConstraints(min_quality=0.9)
    assert policy.route("x", ask).tier == "large"  # not known yet
    assert live.use("float32") is None
    assert policy.route("x", ask).tier == "small"
    assert live.use("int8") is None
    assert policy.route("x", ask).tier == "large"
    complaint = live.use("int4")
    assert complaint is not None
    assert "bfloat16 and int8" in complaint
    route = policy.route("x", ask)
    assert (route.tier, "weights" in route.reason) == ("large", True)
    unknown = LiveAssurance([assurance_of(0.95)])
    assert unknown.use("int4") is None
    assert unknown.current is not None


def test_it_is_kept_in_the_routers_file(tmp_path: Path) -> None:
    scorer = scorer_that_says(0.5, table())
    made = assure(world(200, np.random.default_rng(8)), "int8")
    again = scorer.with_assurance(assurance_of(0.9, "int8")).with_assurance(made)
    assert again.assurances == (made,)  # one for each width
    again.save(tmp_path)
    assert RouterScorer.load(tmp_path).assurances == (made,)
    scorer.save(tmp_path)
    assert RouterScorer.load(tmp_path).assurances == ()


@pytest.mark.parametrize(
    "change",
    [
        {"confidence": 1.0},
        {"stages": ()},
        {"stages": (replace(assurance_of(0.9).stages[0], stage="answer"),)},
    ],
)
def test_what_cannot_be_assured_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"confidence|text"):
        replace(assurance_of(0.9), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quality"):
        AssuredPoint(threshold=0.5, band=None, strong_share=0.5, quality=1.5)
    with pytest.raises(ValueError, match="groups"):
        AssuredStage(stage="text", points=(), groups=())


def test_graded_labels_are_assured_too() -> None:
    rng = np.random.default_rng(9)
    strong: FloatRows = rng.uniform(0.7, 0.9, 400)
    assert kept_quality(0.97 * strong, strong) == pytest.approx(0.965, abs=0.011)
