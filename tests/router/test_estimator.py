from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import Pipeline

from outrider.router.answer_features import answer_features, answer_inputs
from outrider.router.calibration import CalibrationTarget
from outrider.router.dataset import LabelledPrompts, RouterDataError
from outrider.router.estimates import QualityEstimate
from outrider.router.estimator import PromptFeatures, TrainConfig, TrainedRouter
from outrider.router.estimator import train_router as train
from outrider.router.evaluation import apgr
from outrider.router.features import FeatureConfig, prompt_features
from outrider.router.stacking import assign_folds, calibrated
from outrider.router.stages import stage_rows
from tests.router.conftest import QUICK, labelled_answers


def logits_of(estimates: Sequence[QualityEstimate]) -> np.ndarray:
    return np.array([estimate.logits for estimate in estimates])


@pytest.mark.slow
def test_scorer_equals_scikit_learn(trained: TrainedRouter, held_out_data: LabelledPrompts) -> None:
    assert trained.strong is not None
    odd = ["", "日本語 and \ud800", "x " * 5000, "a\x00b"]
    prompts = held_out_data.prompts + odd
    estimates = [trained.scorer.estimate(prompt) for prompt in prompts]
    small = trained.weak.predict_proba(prompts)[:, 1]
    large = trained.strong.predict_proba(prompts)[:, 1]
    assert np.abs(small - [estimate.small for estimate in estimates]).max() < 1e-9
    assert np.abs(large - [estimate.large or 0.0 for estimate in estimates]).max() < 1e-9
    assert np.ptp(small) > 0.5


def test_it_learns_what_decides(trained: TrainedRouter, held_out_data: LabelledPrompts) -> None:
    assert held_out_data.strong is not None
    estimates = [trained.scorer.estimate(prompt) for prompt in held_out_data.prompts]
    gain = np.array([estimate.gain for estimate in estimates])
    assert apgr(gain, held_out_data.weak, held_out_data.strong) > 0.75
    # Calibrated: predicted and observed success agree within each half.
    small = np.array([estimate.small for estimate in estimates])
    for half in (small < 0.5, small >= 0.5):
        assert small[half].mean() == pytest.approx(held_out_data.weak[half].mean(), abs=0.1)


@pytest.mark.slow
def test_the_target_sets_the_operating_point(
    trained: TrainedRouter, training_data: LabelledPrompts
) -> None:
    record = trained.scorer.training
    gap = record["strong_accuracy"] - record["weak_accuracy"]
    kept = (record["held_out_accuracy"] - record["weak_accuracy"]) / gap
    assert 0.95 <= kept < 1.0
    assert 0.2 < record["held_out_strong_share"] < 0.8
    assert trained.scorer.calibration is not None
    assert trained.scorer.calibration.stage == "text"
    assert trained.rows.stages == ("text",)
    few = train(training_data, replace(QUICK, target=CalibrationTarget(strong_share=0.1))).scorer
    assert few.training["held_out_strong_share"] <= 0.1
    assert few.threshold < trained.scorer.threshold


@pytest.mark.slow
def test_same_seed_same_router(training_data: LabelledPrompts) -> None:
    first, again = (train(training_data, QUICK).scorer for _ in range(2))
    assert np.array_equal(again.weight, first.weight)
    assert again.threshold == first.threshold
    assert train(training_data, replace(QUICK, seed=1)).scorer.threshold != first.threshold


@pytest.mark.slow
def test_estimator_contract(training_data: LabelledPrompts) -> None:
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    estimator = Pipeline(
        [("features", PromptFeatures(FeatureConfig())), ("classifier", calibrated(1.0, folds))]
    )
    assert estimator.get_params()["classifier__estimator__C"] == 1.0
    copy = clone(estimator).set_params(features__config=FeatureConfig(num_char_features=1024))
    assert copy.get_params()["features__config"].num_char_features == 1024
    labels = training_data.weak.astype(int)
    scores = cross_val_score(estimator, training_data.prompts, labels, cv=3, scoring="roc_auc")
    assert scores.mean() > 0.85
    fitted = copy.fit(training_data.prompts, labels)
    probabilities = fitted.predict_proba(["What is 1 + 1?", "What is 123456 + 123456?"])
    assert probabilities.shape == (2, 2)
    assert probabilities.sum(axis=1) == pytest.approx(1.0)
    assert probabilities[0, 1] > 0.5 > probabilities[1, 1]


def test_feature_matrix_has_the_rows_that_serving_sees() -> None:
    config = FeatureConfig(num_char_features=256, num_word_features=256)
    prompts = ["one", "", "Add 1 and 2."]
    matrix = PromptFeatures(config).transform(prompts)
    assert matrix.shape == (3, config.num_features)
    for row, prompt in zip(matrix, prompts, strict=True):
        vector = prompt_features(prompt, config)
        assert row.indices.tolist() == vector.indices.tolist()
        assert row.data.tolist() == vector.values.tolist()
    assert PromptFeatures(config).transform([]).shape == (0, config.num_features)


def test_without_large_labels_quality_is_the_small_models_own(
    training_data: LabelledPrompts,
) -> None:
    trained = train(replace(training_data, strong=None), QUICK)
    assert trained.strong is None
    estimate = trained.scorer.estimate("What is 1 + 2?")
    assert estimate.large is None
    assert estimate.quality == pytest.approx(estimate.small)
    assert trained.scorer.training["strong_accuracy"] is None


def test_a_large_model_that_never_errs_is_a_constant(training_data: LabelledPrompts) -> None:
    data = replace(training_data, strong=np.ones_like(training_data.weak))
    trained = train(data, QUICK)
    estimates = [trained.scorer.estimate(prompt) for prompt in data.prompts[:5]]
    assert {estimate.large for estimate in estimates} == {estimates[0].large}
    assert estimates[0].large == pytest.approx(401 / 402)
    assert trained.strong is not None
    assert trained.strong.predict_proba(["x"])[0, 1] == pytest.approx(401 / 402)


@pytest.mark.slow
def test_no_gap_sends_everything_to_the_small_model(training_data: LabelledPrompts) -> None:
    trained = train(replace(training_data, strong=training_data.weak), QUICK)
    assert trained.scorer.threshold == 0.0


@pytest.mark.slow
def test_stages_equal_their_pipelines(trained_stages: TrainedRouter) -> None:
    scorer = trained_stages.scorer
    fresh = labelled_answers(50, seed=7)
    assert fresh.hidden is not None
    assert fresh.logprobs is not None
    text = [scorer.estimate(prompt) for prompt in fresh.prompts]
    prompt = [
        scorer.estimate_prompt(estimate, state)
        for estimate, state in zip(text, fresh.hidden, strict=True)
    ]
    answer = [
        scorer.estimate_answer(estimate, seen[:8], is_whole=len(seen) < 8)
        for estimate, seen in zip(prompt, fresh.logprobs, strict=True)
    ]
    prompt_inputs = np.hstack((logits_of(text), fresh.hidden))
    answer_rows = [
        answer_inputs(estimate.logits, answer_features(seen[:8], is_whole=len(seen) < 8))
        for estimate, seen in zip(prompt, fresh.logprobs, strict=True)
    ]
    for estimates, pipelines, inputs in (
        (prompt, trained_stages.probe, prompt_inputs),
        (answer, trained_stages.answer, np.array(answer_rows)),
    ):
        small, large = (pipeline.predict_proba(inputs)[:, 1] for pipeline in pipelines)
        assert small == pytest.approx([estimate.small for estimate in estimates], abs=1e-9)
        assert large == pytest.approx([estimate.large for estimate in estimates], abs=1e-9)
        assert np.ptp(small) > 0.5


def test_both_probes_are_recorded_and_the_better_one_is_kept(
    trained_stages: TrainedRouter,
) -> None:
    record = trained_stages.scorer.training["held_out"]
    errors = {name: figures["gain_error"] for name, figures in record.items()}
    # The hidden state shows the trap only, the text the length only.
    assert errors["text_and_probe"] < min(errors["text"], errors["probe"])
    assert errors["answer_at_hold_back"] < errors["text_and_probe"]
    assert errors["answer_at_hold_back"] != errors["answer_whole"]
    assert trained_stages.rows.hold_back_tokens == 16
    assert trained_stages.scorer.probe is not None
    assert np.abs(trained_stages.scorer.probe.weight[:, :2]).max() > 0.1
    assert trained_stages.scorer.pair == "0123456789abcdef-fedcba9876543210"
    assert trained_stages.rows.stages == ("text", "prompt", "answer")


@pytest.mark.slow
def test_a_probe_alone_does_not_look_at_the_text() -> None:
    data = labelled_answers(400, seed=3)
    assert data.hidden is not None
    # A state that knows the answer leaves the text nothing to add but noise.
    hidden = data.hidden.copy()
    hidden[:, 0] = 5.0 * data.weak
    trained = train(replace(data, hidden=hidden, logprobs=None), QUICK)
    record = trained.scorer.training["held_out"]
    assert record["probe"]["gain_error"] < 0.1
    if record["probe"]["gain_error"] < record["text_and_probe"]["gain_error"]:
        assert trained.scorer.probe is not None
        assert not trained.scorer.probe.weight[:, :2].any()
    assert trained.scorer.answer is None


@pytest.mark.slow
def test_stages_that_know_nothing_are_left_out(training_data: LabelledPrompts) -> None:
    rng = np.random.default_rng(0)
    num_rows = len(training_data.prompts)
    data = replace(
        training_data,
        hidden=rng.normal(size=(num_rows, 40)),
        logprobs=[np.full(5, -0.1)] * num_rows,
    )
    trained = train(data, replace(QUICK, stage_penalties=(1.0,)))
    assert (trained.scorer.probe, trained.scorer.answer) == (None, None)
    assert (trained.probe, trained.answer) == ((), ())
    assert trained.rows.stages == ("text",)
    assert "text_and_probe" in trained.scorer.training["held_out"]


@pytest.mark.slow
def test_held_out_figures_promise_nothing_for_random_labels() -> None:
    data = labelled_answers(400, seed=4)
    rng = np.random.default_rng(5)
    weak, strong = (rng.random((2, 400)) < [[0.5], [0.8]]).astype(np.float64)
    trained = train(replace(data, weak=weak, strong=strong), QUICK)
    for figures in trained.scorer.training["held_out"].values():
        assert figures["apgr"] == pytest.approx(0.5, abs=0.12)


@pytest.mark.slow
def test_held_out_rows_promise_what_new_prompts_keep(trained_stages: TrainedRouter) -> None:
    fresh = labelled_answers(1500, seed=8)
    assert fresh.strong is not None
    rows = stage_rows(trained_stages.scorer, fresh)
    truth = fresh.strong - fresh.weak
    record = trained_stages.scorer.training["held_out"]
    names = ("text", "text_and_probe", "answer_at_hold_back")
    for stage, name in zip(rows.stages, names, strict=True):
        error = float(np.mean((truth - (1.0 - rows.quality(stage))) ** 2))
        assert error == pytest.approx(record[name]["gain_error"], abs=0.04)


def test_a_score_is_learnt_as_the_share_of_right_answers() -> None:
    easy, hard = ["Say yes please."] * 50, ["Prove the theorem now!"] * 50
    prompts = [f"{text} {number}" for number, text in enumerate(easy + hard)]
    graded = np.array([0.75] * 50 + [0.25] * 50)
    rng = np.random.default_rng(0)
    data = LabelledPrompts(prompts=prompts, weak=graded, strong=None, sha256="")
    config = replace(QUICK, inverse_penalties=(10.0,))
    scorer = train(data, config).scorer
    assert scorer.estimate(prompts[0]).small == pytest.approx(0.75, abs=0.05)
    assert scorer.estimate(prompts[-1]).small == pytest.approx(0.25, abs=0.05)
    drawn = replace(data, weak=(rng.random(100) < graded).astype(np.float64))
    assert train(drawn, config).scorer.estimate(prompts[0]).small == pytest.approx(0.75, abs=0.2)


def test_rows_of_one_prompt_share_a_fold_and_labels_are_spread() -> None:
    rng = np.random.default_rng(0)
    prompts = [f"prompt {number}" for number in rng.integers(0, 300, 500)]
    label_of = {prompt: rng.random(2) < (0.5, 0.9) for prompt in prompts}
    scores = list(np.array([label_of[prompt] for prompt in prompts]).T.astype(np.float64))
    folds = assign_folds(prompts, scores, 5, seed=3)
    assert set(folds.tolist()) == set(range(5))
    fold_of = dict(zip(prompts, folds.tolist(), strict=True))
    assert [fold_of[prompt] for prompt in prompts] == folds.tolist()
    for tier in range(2):
        for value in (False, True):
            counts = np.bincount(
                [fold_of[prompt] for prompt in fold_of if label_of[prompt][tier] == value],
                minlength=5,
            )
            assert np.ptp(counts) <= 2
    assert not np.array_equal(folds, assign_folds(prompts, scores, 5, seed=4))


def test_training_prompts_are_remembered(
    trained: TrainedRouter, training_data: LabelledPrompts, held_out_data: LabelledPrompts
) -> None:
    assert trained.scorer.was_trained_on(training_data.prompts).all()
    known = set(training_data.prompts)
    expected = [prompt in known for prompt in held_out_data.prompts]
    assert trained.scorer.was_trained_on(held_out_data.prompts).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_too_little_to_learn_from_is_refused(training_data: LabelledPrompts) -> None:
    few = LabelledPrompts(prompts=["a"] * 6, weak=np.array([0.0, 1.0] * 3), strong=None, sha256="")
    with pytest.raises(RouterDataError, match="6 rows are too few"):
        train(few)
    one_sided = LabelledPrompts(
        prompts=training_data.prompts, weak=np.ones(400), strong=None, sha256=""
    )
    with pytest.raises(RouterDataError, match="1 in 400 rows and 0 in 0"):
        train(one_sided)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inverse_penalties", (0.0,)),
        ("num_folds", 1),
        ("stage_penalties", ()),
        ("hold_back_tokens", 0),
    ],
)
def test_a_wrong_training_setting_names_itself(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})
