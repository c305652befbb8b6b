"""More than two tiers: the choice of one, labels, training, files, and the same as of two."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.gateway.tools.learning.routers.commands import app
from outrider.router.calibration import ALWAYS_LARGE, CalibrationTarget, calibrate
from outrider.router.dataset import LabelledPrompts, RouterDataError, read_labelled_prompts
from outrider.router.estimates import QualityEstimate
from outrider.router.estimator import train_router
from outrider.router.evaluation import evaluate
from outrider.router.files import RouterFileError, RouterFiles, read_files, write_files
from outrider.router.frontier import frontier
from outrider.router.label_checks import beaten_tiers, label_complaints
from outrider.router.ladder import Ladder, LadderRows
from outrider.router.policy import NO_CONSTRAINTS, TrainedPolicy, own_setting
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows, tier_rows
from outrider.router.tier_labels import TierTerms, by_cost, completed
from outrider.router.tier_policy import TierPolicy, TierWish
from tests.router.conftest import QUICK, labelled_sums
from tests.router.tier_worlds import BIG, MID, MINI, ladder_of, scorer_of, three_tiers

CHANCE = st.floats(0.0, 1.0)


# ---- the choice ----------------------------------------------------------------------------------


@given(small=CHANCE, large=CHANCE, threshold=st.floats(0.0, ALWAYS_LARGE), cost=st.floats(0.1, 1e3))
def test_two_tiers_are_chosen_as_by_the_threshold(
    small: float, large: float, threshold: float, cost: float
) -> None:
    ladder = ladder_of(cost, 7.0 * cost)
    quality = QualityEstimate(small=small, large=large).quality
    assert ladder.quality((small, large)) == quality
    for bar in (threshold, quality):
        assert ladder.choose((small, large), bar) == (0 if quality >= bar else 1)


@given(chances=st.lists(st.tuples(CHANCE, CHANCE, CHANCE), min_size=1, max_size=5))
def test_rows_are_chosen_as_prompts_one_by_one(chances: list[tuple[float, float, float]]) -> None:
    ladder = ladder_of(1.0, 2.5, 40.0)
    values = np.array(chances).T
    rows = LadderRows(ladder=ladder, chances=values, scores=values, usd=values)
    for threshold in (0.0, 0.5, 0.9, 0.99, 1.0, ALWAYS_LARGE, *np.unique(rows.cuts()).tolist()):
        expected = [ladder.choose(each, threshold) for each in chances]
        assert rows.chosen(threshold).tolist() == expected
        leaves = [ladder.quality(each) < threshold for each in chances]
        assert [place > 0 for place in expected] == leaves


def test_a_dearer_tier_must_gain_more() -> None:
    ladder = ladder_of(1.0, 2.0, 11.0)
    chances = (0.5, 0.8, 0.9)
    assert [ladder.choose(chances, at) for at in (0.5, 0.75, 0.98, 0.995)] == [0, 1, 1, 2]
    assert ladder.choose(chances, 0.75, {0, 2}) == 0  # 0.4 for ten steps
    assert ladder.choose((0.9, 0.9, 0.9), 1.0) == 0
    assert ladder.choose((0.9, 0.5, 0.1), ALWAYS_LARGE) == 2


@pytest.mark.parametrize(
    ("names", "costs", "said"),
    [
        (("a",), (1.0,), "2 to 16 different tiers"),
        (("a", "a"), (1.0, 2.0), "2 to 16 different tiers"),
        (("a", "b\n"), (1.0, 2.0), "no name of a tier"),
        (("a", "b"), (2.0, 1.0), "must rise"),
        (("a", "b"), (-1.0, 1.0), "0 or more"),
        (("a", "b"), (1.0, float("nan")), "0 or more"),
    ],
)
def test_what_are_no_tiers(names: tuple[str, ...], costs: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ladder(names=names, costs=costs, accuracies=(0.5,) * len(costs), unlabelled=())


# ---- labels --------------------------------------------------------------------------------------


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def test_one_column_a_model_as_routerbench_has_them(tmp_path: Path) -> None:
    csv = tmp_path / "labels.csv"
    csv.write_text(
        "prompt,gpt/x,tiny,gpt/x|total_cost,tiny|total_cost\n"
        "one,1.0,0.0,0.004,0.0001\ntwo,0.5,true,0.006,0.0003\n"
    )
    data = read_labelled_prompts(csv, [TierTerms(name="gpt/x"), TierTerms(name="tiny")])
    assert data.tiers is not None
    assert data.tiers.names == ("tiny", "gpt/x")
    assert data.tiers.costs == pytest.approx((0.0002, 0.005))
    assert [scores.tolist() for scores in data.scores] == [[0.0, 1.0], [1.0, 0.5]]


@pytest.mark.parametrize(
    ("cells", "terms", "said"),
    [
        ({"a": 1, "b": 0}, "a=1,b", "what does b cost"),
        ({"a": 1, "b": 0}, "a=1,b=1", "cost the same"),
        ({"a": 1, "b": 0}, "b=1", "2 to 16"),
        ({"b": 0}, "a=1,b=2", "a is the cheapest tier and has no labels"),
        ({}, "a=1,b=2", "none of a, b has a column"),
        ({"a": 1.5, "b": 0}, "a=1,b=2", "a is 1.5, not 0, 1 or a share"),
        ({"a": 1, "b": 0, "a|total_cost": -1}, "a,b=2", "not a number of 0 or more"),
    ],
)
def test_labels_that_cannot_be_read(
    tmp_path: Path, cells: dict[str, object], terms: str, said: str
) -> None:
    named = [part.split("=") for part in terms.split(",")]
    tiers = [TierTerms(name=n, cost=float(rest[0]) if rest else None) for n, *rest in named]
    with pytest.raises(RouterDataError, match=said):
        read_labelled_prompts(write(tmp_path / "x.jsonl", {"prompt": "p", **cells}), tiers)


def test_a_column_is_in_all_rows_or_in_none(tmp_path: Path) -> None:
    rows = ({"prompt": "p", "a": 1, "b": 1}, {"prompt": "q", "a": 1})
    tiers = [TierTerms(name="a", cost=1.0), TierTerms(name="b", cost=2.0)]
    with pytest.raises(RouterDataError, match="b is missing in 1 rows of 2"):
        read_labelled_prompts(write(tmp_path / "x.jsonl", *rows), tiers)


def test_a_cheaper_tier_that_beats_a_dearer_one_is_complained_of() -> None:
    data = three_tiers(300, seed=1)
    assert label_complaints(data) == []
    poisoned = three_tiers(
        300, 1, [TierTerms(name=n, cost=c) for n, c in ((MINI, 1.0), (MID, 20.0), (BIG, 10.0))]
    )
    assert poisoned.tiers is not None
    assert beaten_tiers(poisoned.tiers) == [(MID, BIG)]
    (said,) = label_complaints(poisoned)
    assert said.startswith("big costs less than mid and beats it")


# ---- tiers without labels ------------------------------------------------------------------------


def held_out() -> np.ndarray:
    return np.array([[0.2, 0.4, 0.6], [0.6, 0.8, 0.9]])


def test_a_tier_between_labelled_ones_is_between_them() -> None:
    terms = [TierTerms(name=name, cost=cost) for name, cost in zip("abc", (1, 2, 3), strict=True)]
    column = np.array([1.0, 0.0, 1.0])
    tiers = by_cost(terms, {"a": column, "c": column}, {})
    chances = completed(tiers, held_out()).chances(held_out())
    assert np.array_equal(chances[[0, 2]], held_out())
    assert (chances[0] < chances[1]).all()
    assert (chances[1] < chances[2]).all()


def test_a_stated_accuracy_is_the_mean_chance() -> None:
    terms = [
        TierTerms(name="a", cost=1.0, accuracy=0.1),
        TierTerms(name="b", cost=2.0),
        TierTerms(name="c", cost=3.0),
        TierTerms(name="d", cost=4.0, accuracy=0.95),
        TierTerms(name="e", cost=5.0),
    ]
    column = np.array([1.0, 0.0, 1.0])
    tiers = by_cost(terms, {"b": column, "c": column}, {})
    chances = completed(tiers, held_out()).chances(held_out())
    assert chances[0].mean() == pytest.approx(0.1)
    assert chances[3].mean() == pytest.approx(0.95)
    assert (chances[3] > chances[2]).all()
    assert chances[4].tolist() == [1.0] * 3  # never wrong, as a large tier without labels


# ---- training ------------------------------------------------------------------------------------


def pair_as_tiers(data: LabelledPrompts) -> LabelledPrompts:
    assert data.strong is not None
    terms = [TierTerms(name=MINI, cost=0.3), TierTerms(name=BIG, cost=4.1)]
    return data.for_tiers(by_cost(terms, {MINI: data.weak, BIG: data.strong}, {}))


@pytest.mark.slow
def test_two_tiers_are_learnt_and_decided_on_to_the_last_bit() -> None:
    data, others = labelled_sums(200, seed=3), labelled_sums(100, seed=4)
    pair = train_router(data, QUICK).scorer
    trained = train_router(pair_as_tiers(data), QUICK).scorer
    assert np.array_equal(trained.weight, pair.weight)
    assert np.array_equal(trained.bias, pair.bias)
    assert trained.calibration == pair.calibration
    assert trained.assurances == pair.assurances
    old = TrainedPolicy(scorer=pair, current_setting=lambda: own_setting(pair))
    new = TierPolicy.of(trained, abstains=False)
    for prompt in others.prompts:
        route = old.route(prompt)
        found = new.route(prompt, TierWish())
        assert (found.order[0] == MINI, found.quality) == (route.tier == "small", route.quality)
        for threshold in (0.2, 0.5, route.quality or 0.0, 0.9, 1.0):
            asked = old.route(prompt, replace(NO_CONSTRAINTS, threshold=threshold))
            found = new.route(prompt, TierWish(threshold=threshold))
            assert (found.order[0] == MINI) == (asked.tier == "small")
    rows = stage_rows(pair, others), stage_rows(trained, pair_as_tiers(others))
    reports = [evaluate(each, threshold=0.7, num_resamples=20) for each in rows]
    assert reports[0].setting == reports[1].setting
    assert reports[0].setting_accuracy == reports[1].setting_accuracy
    assert reports[0].oracle_accuracy == reports[1].oracle_accuracy


@pytest.mark.slow
def test_three_tiers_are_used_for_what_they_know(tmp_path: Path) -> None:
    scorer = train_router(three_tiers(400, seed=1), QUICK).scorer
    scorer.save(tmp_path)
    policy = TierPolicy.load(tmp_path)
    assert [
        policy.route(f"What is {x} + {x}?", TierWish()).order[0] for x in (4, 4321, 654321)
    ] == [
        MINI,
        MID,
        BIG,
    ]
    assert RouterScorer.load(tmp_path).tiers == scorer.tiers
    rows = stage_rows(scorer, three_tiers(400, seed=2))
    assert rows.tiers is not None
    accuracies = rows.tiers.scores.mean(axis=1)
    calibrated = calibrate(rows, CalibrationTarget(max_cost_usd=4.0, prices={}))
    assert calibrated.chosen.accuracy > accuracies[:2].max() + 0.05
    bounds = frontier(rows, calibrated.points, calibrated.chosen, None)
    assert bounds.setting.cost_usd is not None
    assert bounds.setting.cost_usd <= 4.0
    assert list(bounds.singles) == [MINI, MID, BIG]
    assert bounds.oracle.accuracy == pytest.approx(rows.tiers.scores.max(axis=0).mean())


@pytest.mark.slow
def test_a_tier_that_is_beaten_everywhere_is_left_out_and_named(tmp_path: Path) -> None:
    rows = three_tiers(300, seed=1)
    assert rows.tiers is not None
    names = {MINI: MINI, "worse": MINI, BIG: BIG}
    rng = np.random.default_rng(0)
    lines: list[dict[str, object]] = []
    for place, prompt in enumerate(rows.prompts):
        line: dict[str, object] = {"prompt": prompt}
        for name, source in names.items():
            score = float(rows.tiers.scores[source][place])
            line[name] = score * float(rng.random() < 0.7) if name == "worse" else score
        lines.append(line)
    file, out = write(tmp_path / "labels.jsonl", *lines), tmp_path / "router"
    words = ["train", "--data", str(file), "--out", str(out), "--tiers", "mini=1,worse=5,big=20"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "mini costs less than worse and beats it" in " ".join(refused.output.split())
    trained = CliRunner().invoke(app, [*words, "--trust-labels"])
    assert trained.exit_code == 0, trained.output
    assert "note: worse is never chosen" in trained.output
    assert TierPolicy.load(out).ladder.names == (MINI, BIG)
    judged = CliRunner().invoke(app, ["eval", "--router", str(out), "--data", str(file), "--json"])
    assert set(json.loads(judged.stdout)["tiers"]) == {MINI, BIG}


# ---- the request's wishes ------------------------------------------------------------------------


def policy_of(*chances: float, threshold: float = 0.9) -> TierPolicy:
    return TierPolicy.of(scorer_of(chances, threshold=threshold))


def test_the_others_follow_in_the_order_of_their_worth() -> None:
    route = policy_of(0.5, 0.8, 0.9).route("x", TierWish())
    assert route.order == (MID, MINI, BIG)
    assert route.reason == "router: mid is worth its price (mini 0.50, mid 0.80, big 0.90)"
    assert route.chances == pytest.approx({MINI: 0.5, MID: 0.8, BIG: 0.9})


def test_a_preference_goes_before_worth() -> None:
    policy = policy_of(0.5, 0.8, 0.9)
    assert policy.route("x", TierWish(prefer="price")).order == (MINI, MID, BIG)
    assert policy.route("x", TierWish(prefer="quality")).order == (BIG, MID, MINI)
    kept = replace(policy, min_quality=0.9)
    assert kept.route("x", TierWish(prefer="price")).order == (MID, BIG, MINI)
    assert kept.route("x", TierWish()).order == (MID, MINI, BIG)
    quick = {BIG: 0.1, MINI: 0.2}
    assert policy.route("x", TierWish(prefer="latency", first_token_s=quick)).order == (
        BIG,
        MINI,
        MID,
    )


def test_a_quality_is_kept_by_no_cheaper_tier_than_the_chosen_one() -> None:
    """The calibration's one point keeps 0.9 at the threshold 0.9."""
    policy = policy_of(0.5, 0.8, 0.9)
    assert policy.route("x", TierWish(min_quality=0.9)).order == (MID, BIG)
    assert policy.route("x", TierWish(min_quality=0.9, prefer="price")).order == (MID, BIG)


def test_an_unlike_prompt_is_judged_by_the_accuracies() -> None:
    trained = train_router(three_tiers(60, seed=1), QUICK).scorer
    policy = TierPolicy.of(trained)
    route = policy.route("Ein ganz anderer Text über Schiffe", TierWish())
    assert route.reason.startswith("router: prompt unlike the router's training, ")
    assert tuple(route.chances.values()) == policy.ladder.accuracies
    assert policy.route("Schiffe ohne Segel", TierWish(min_quality=0.5)).order == (BIG,)


# ---- files ---------------------------------------------------------------------------------------


def test_a_router_of_a_pair_is_no_router_of_tiers(tmp_path: Path) -> None:
    pair = replace(scorer_of((0.5, 0.9), ladder_of(1.0, 2.0)), tiers=None)
    pair.save(tmp_path)
    assert RouterScorer.load(tmp_path).tiers is None
    with pytest.raises(RouterFileError, match=r"set it as models\.router"):
        TierPolicy.load(tmp_path)


def test_a_router_of_version_three_is_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = replace(scorer_of((0.5, 0.9), ladder_of(1.0, 2.0)), tiers=None)
    monkeypatch.setattr("outrider.router.files.FORMAT_VERSION", 3)
    pair.save(tmp_path)
    files = read_files(tmp_path)
    config = {name: value for name, value in files.config.items() if name != "tiers"}
    write_files(tmp_path, RouterFiles(config=config, arrays=files.arrays))
    read = RouterScorer.load(tmp_path)
    assert (read.tiers, read.estimate("x")) == (None, pair.estimate("x"))


def test_tiers_survive_the_file(tmp_path: Path) -> None:
    scorer = scorer_of((0.4, 0.6, 0.8), ladder_of(1.0, 2.0, 3.0, unlabelled=(MID,)))
    scorer.save(tmp_path)
    assert RouterScorer.load(tmp_path).tiers == scorer.tiers
    with pytest.raises(ValueError, match=r"not \[3\]"):
        scorer_of((0.4, 0.6), ladder_of(1.0, 2.0, 3.0))


def test_tier_rows_hold_the_ends() -> None:
    values = np.array([[0.2, 0.9], [0.5, 0.9], [0.8, 0.9]])
    ladder = ladder_of(1.0, 2.0, 3.0)
    rows = tier_rows(LadderRows(ladder=ladder, chances=values, scores=values, usd=values))
    assert rows.weak.tolist() == [0.2, 0.9]
    assert rows.strong.tolist() == [0.8, 0.9]
    assert rows.text.tolist() == pytest.approx([0.7, 1.0])
