from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.costs import TypicalRequest
from outrider.router.dial import Dial, Setting
from outrider.router.estimates import LinearStage
from outrider.router.estimator import TrainedRouter
from outrider.router.loading import RoutingOptions, load_router
from outrider.router.policy import (
    FixedPolicy,
    RouteConstraintError,
    RouteConstraints,
    RoutePolicy,
    TrainedPolicy,
    WatchOptions,
    WatchVerdict,
    own_setting,
    pair_complaint,
)
from outrider.router.scorer import RouterFileError, RouterScorer
from outrider.verifier.params import TIERS, Tier
from tests.router.routers import scorer_that_says, table


def policy_of(scorer: RouterScorer, setting: Setting | None = None, **more: Any) -> TrainedPolicy:
    chosen = setting or own_setting(scorer)
    dial = None if scorer.calibration is None else Dial(scorer.calibration)
    return TrainedPolicy(scorer=scorer, current_setting=lambda: chosen, dial=dial, **more)


def load_policy(
    path: Path | None, tiers: Sequence[Tier] = TIERS, threshold: float | None = None
) -> RoutePolicy:
    options = RoutingOptions(threshold=threshold, watch=WatchOptions(mode="off"))
    return load_router(path, tiers, options, TypicalRequest()).policy


@pytest.mark.parametrize(
    ("probability", "tier", "reason"),
    [
        (0.93, "small", "router: small model likely right (0.93 >= 0.72)"),
        (0.41, "large", "router: small model too weak (0.41 < 0.72)"),
    ],
)
def test_threshold_decides_and_explains(probability: float, tier: str, reason: str) -> None:
    route = policy_of(scorer_that_says(probability), Setting(threshold=0.72)).route("anything")
    assert (route.tier, route.reason) == (tier, reason)
    assert route.quality == pytest.approx(probability)
    assert (route.threshold, route.band, route.stage, route.watch) == (0.72, None, "text", None)
    assert route.is_own


def test_the_threshold_itself_is_good_enough() -> None:
    scorer = scorer_that_says(0.5)
    assert policy_of(scorer, Setting(threshold=0.5)).route("x").tier == "small"
    assert policy_of(scorer, Setting(threshold=0.0)).route("x").tier == "small"
    assert policy_of(scorer, Setting(threshold=ALWAYS_LARGE)).route("x").tier == "large"


def test_a_threshold_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=1\.5"):
        Setting(threshold=1.5)


# The table's chosen point: threshold 0.5, band (0.3, 0.7).
@pytest.mark.parametrize(
    ("probability", "tier", "reason", "is_watched"),
    [
        (0.8, "small", "router: small model likely right (0.80 >= 0.70)", False),
        (0.6, "small", "router: small model begins under watch (0.60 < 0.70)", True),
        (0.4, "small", "router: small model begins under watch (0.40 < 0.70)", True),
        (0.2, "large", "router: small model too weak (0.20 < 0.30)", False),
    ],
)
def test_a_band_is_watched(probability: float, tier: str, reason: str, is_watched: bool) -> None:
    route = policy_of(scorer_that_says(probability, table())).route("x")
    assert (route.tier, route.reason) == (tier, reason)
    assert (route.watch is not None) == is_watched
    assert route.stage == ("answer" if is_watched else "text")
    assert route.band == pytest.approx((0.3, 0.7))


def test_a_router_that_reads_the_prompt_watches_all_until_it_is_read() -> None:
    calibration = table(stage="prompt")
    bare = policy_of(scorer_that_says(0.9, calibration), Setting(threshold=0.5))
    route = bare.route("x")
    assert route.tier == "small"
    assert route.stage == "prompt"
    assert route.watch is not None
    assert route.watch.new_watch().on_prompt(None).action == "commit"
    weak = policy_of(scorer_that_says(0.4, calibration), Setting(threshold=0.5)).route("x")
    assert weak.watch is not None
    assert weak.watch.new_watch().on_prompt(None).action == "escalate"


def test_the_cascade_can_be_switched_off_and_keeps_the_share() -> None:
    # Text qualities were uniform, so a strong share of 0.5 means a text threshold of 0.5.
    off = WatchOptions(mode="off")
    for probability, tier in ((0.51, "small"), (0.49, "large")):
        route = policy_of(scorer_that_says(probability, table()), watch=off).route("x")
        assert (route.tier, route.watch, route.band) == (tier, None, None)
        assert route.threshold == pytest.approx(0.5)


def test_the_cascade_can_be_forced_without_any_calibration() -> None:
    always = WatchOptions(mode="always")
    route = policy_of(scorer_that_says(0.9), watch=always).route("x")
    assert route.watch is not None
    watch = route.watch.new_watch()
    assert watch.on_prompt(None).action == "hold"
    assert watch.on_tokens([-0.01] * 16).action == "commit"
    doubtful = route.watch.new_watch()
    assert doubtful.on_tokens([-4.0] * 16).action == "escalate"


def test_unstreamed_answers_are_judged_whole_unless_told_otherwise() -> None:
    scorer = scorer_that_says(0.5, table())
    whole = policy_of(scorer).route("x", RouteConstraints(is_whole=True)).watch
    streamed = policy_of(scorer).route("x").watch
    options = WatchOptions(judge_whole=False, hold_back_s=0.1, mid_stream=True)
    early = policy_of(scorer, watch=options).route("x", RouteConstraints(is_whole=True)).watch
    assert whole is not None
    assert streamed is not None
    assert early is not None
    assert (whole.hold_back_s, streamed.hold_back_s, early.hold_back_s) == (None, 0.25, 0.1)
    assert whole.new_watch().on_tokens([-0.1] * 64).action == "hold"
    assert streamed.new_watch().on_tokens([-0.1] * 64).action != "hold"
    assert early.mid_stream
    assert not streamed.wants_hidden_state


@given(wanted=st.floats(0.0, 1.0), quality=st.floats(0.01, 0.99))
def test_a_higher_min_quality_only_ever_moves_to_large(wanted: float, quality: float) -> None:
    policy = policy_of(scorer_that_says(quality, table()))
    order = {"small": 0, "large": 1}

    def rank(min_quality: float) -> tuple[int, float]:
        route = policy.route("x", RouteConstraints(min_quality=min_quality))
        assert route.threshold is not None
        return order[route.tier], route.threshold

    for one, other in zip(rank(wanted * 0.9), rank(wanted), strict=True):
        assert one <= other


def test_min_quality_picks_a_point_and_is_no_setting_of_the_servers() -> None:
    route = policy_of(scorer_that_says(0.9, table())).route("x", RouteConstraints(min_quality=1.0))
    assert route.watch is not None  # the band there: (0.8, always large)
    assert route.threshold == pytest.approx(1.0)
    assert not route.is_own
    assert policy_of(scorer_that_says(0.05, table())).route("x").is_own
    with pytest.raises(RouteConstraintError, match="calibration table"):
        policy_of(scorer_that_says(0.5)).route("x", RouteConstraints(min_quality=0.9))
    assert FixedPolicy("large").route("x", RouteConstraints(min_quality=1.0)).tier == "large"
    with pytest.raises(RouteConstraintError, match="small model"):
        FixedPolicy("small", "one tier loaded").route("x", RouteConstraints(min_quality=0.5))


def test_a_threshold_and_a_hold_back_of_the_requests_own() -> None:
    policy = policy_of(scorer_that_says(0.6))
    assert policy.route("x", RouteConstraints(threshold=0.59)).tier == "small"
    strict = policy.route("x", RouteConstraints(threshold=0.61))
    assert (strict.tier, strict.threshold, strict.is_own) == ("large", 0.61, False)
    watched = policy_of(scorer_that_says(0.5, table()))
    own = watched.route("x", RouteConstraints(hold_back_tokens=4, hold_back_s=0.05))
    assert own.watch is not None
    assert own.watch.hold_back_s == 0.05
    assert not own.is_own
    assert own.watch.new_watch().on_tokens([-0.1] * 4).action != "hold"
    usual = watched.route("x").watch
    assert usual is not None
    assert usual.new_watch().on_tokens([-0.1] * 4).action == "hold"


def test_a_conversation_stays_where_its_cache_is() -> None:
    scorer = scorer_that_says(0.45)
    policy = policy_of(scorer, Setting(threshold=0.5))
    assert policy.route("x").tier == "large"
    stays = policy.route(
        "x", RouteConstraints(current="small", gain_factor=1.2)
    )  # 1 - 1.2 * 0.5 = 0.4
    assert stays.tier == "small"
    assert stays.reason == (
        "router: conversation stays on small, small model likely right (0.45 >= 0.40)"
    )
    moves = policy.route("x", RouteConstraints(current="small", gain_factor=1.05))
    assert moves.tier == "large"
    assert "conversation moves to large" in moves.reason
    likely = policy_of(scorer_that_says(0.6), Setting(threshold=0.5))
    assert likely.route("x").tier == "small"
    assert likely.route("x", RouteConstraints(current="large", gain_factor=0.5)).tier == "large"
    # Where the cached large model is the cheaper one, it need not gain anything.
    sure = policy_of(scorer_that_says(0.999), Setting(threshold=0.0))
    assert sure.route("x", RouteConstraints(current="large", gain_factor=0.0)).tier == "large"
    assert not sure.route("x", RouteConstraints(current="large", gain_factor=0.0)).is_own


def test_verdicts_are_told_for_requests_without_wishes() -> None:
    told: list[WatchVerdict] = []
    policy = policy_of(scorer_that_says(0.6, table()), on_verdict=told.append)
    for constraints in (RouteConstraints(), RouteConstraints(min_quality=0.8)):
        plan = policy.route("x", constraints).watch
        assert plan is not None
        watch = plan.new_watch()
        watch.on_prompt(None)
        watch.on_end()
        watch.on_end()
    (verdict,) = told
    assert verdict.quality == pytest.approx(0.6)
    assert not verdict.is_escalated


def test_a_trained_answer_stage_decides() -> None:
    from outrider.router.answer_features import num_answer_inputs

    num_inputs = num_answer_inputs(1)
    hopeless = LinearStage(weight=np.zeros((1, num_inputs)), bias=np.array([-5.0]))
    plan = policy_of(scorer_that_says(0.6, table(), answer=hopeless)).route("x").watch
    assert plan is not None
    assert plan.new_watch().on_tokens([-0.1] * 16).action == "escalate"


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


def test_loading_says_why_there_is_no_choice(router_folder: Path) -> None:
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


def test_loading_takes_the_trained_threshold_unless_told(
    router_folder: Path, trained: TrainedRouter
) -> None:
    default, told = load_policy(router_folder), load_policy(router_folder, threshold=0.0)
    assert isinstance(default, TrainedPolicy)
    assert isinstance(told, TrainedPolicy)
    assert default.current_setting().threshold == trained.scorer.threshold
    assert told.current_setting().threshold == 0.0
    assert told.route("What is 53412 + 91283?").tier == "small"


def test_loading_refuses_what_is_not_a_router(tmp_path: Path) -> None:
    with pytest.raises(RouterFileError):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="no tier is loaded"):
        load_policy(None, tiers=())


def test_a_router_of_another_pair_is_told_by_its_fingerprints() -> None:
    assert pair_complaint("aa-bb", "aa", "bb") is None
    assert pair_complaint(None, "aa", "bb") is None
    assert pair_complaint("aa-bb", "", "bb") is None  # nobody knows
    complaint = pair_complaint("aa-bb", "aa", "cc")
    assert complaint is not None
    assert "aa-bb" in complaint
    assert "aa-cc" in complaint
    assert "force_router" in complaint
