import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

from router.dataset import LabelledPrompts, RouterDataError
from router.estimator import PromptFeatures, TrainConfig, TrainedRouter, quality_estimator
from router.estimator import train_router as train
from router.evaluation import apgr
from router.features import FeatureConfig, prompt_features

QUICK = TrainConfig(inverse_penalties=(1.0,))


def unlabelled(data: LabelledPrompts, strong: np.ndarray | None = None) -> LabelledPrompts:
    return LabelledPrompts(prompts=data.prompts, weak=data.weak, strong=strong, sha256=data.sha256)


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


def test_threshold_keeps_the_promised_share_of_the_gap(
    trained: TrainedRouter, training_data: LabelledPrompts
) -> None:
    assert training_data.strong is not None
    record = trained.scorer.training
    gap = record["strong_accuracy"] - record["weak_accuracy"]
    kept = (record["held_out_accuracy"] - record["weak_accuracy"]) / gap
    assert kept == pytest.approx(0.95, abs=0.03)
    assert 0.2 < record["held_out_strong_share"] < 0.7


def test_same_seed_same_router(training_data: LabelledPrompts) -> None:
    first, again = (train(training_data, QUICK).scorer for _ in range(2))
    assert np.array_equal(again.weight, first.weight)
    assert again.threshold == first.threshold


def test_estimator_contract(training_data: LabelledPrompts) -> None:
    estimator = quality_estimator(inverse_penalty=1.0)
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
    trained = train(unlabelled(training_data), QUICK)
    assert trained.strong is None
    estimate = trained.scorer.estimate("What is 1 + 2?")
    assert estimate.large is None
    assert estimate.quality == pytest.approx(estimate.small)
    assert trained.scorer.training["strong_accuracy"] is None


def test_a_large_model_that_never_errs_is_a_constant(training_data: LabelledPrompts) -> None:
    data = unlabelled(training_data, np.ones_like(training_data.weak))
    trained = train(data, QUICK)
    estimates = [trained.scorer.estimate(prompt) for prompt in data.prompts[:5]]
    assert {estimate.large for estimate in estimates} == {estimates[0].large}
    assert estimates[0].large == pytest.approx(401 / 402)
    assert trained.strong is not None
    assert trained.strong.predict_proba(["x"])[0, 1] == pytest.approx(401 / 402)


def test_no_gap_sends_everything_to_the_small_model(training_data: LabelledPrompts) -> None:
    trained = train(unlabelled(training_data, training_data.weak), QUICK)
    assert trained.scorer.threshold == 0.0


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
    [("inverse_penalties", (0.0,)), ("num_folds", 1), ("recovered_gap", 1.5)],
)
def test_a_wrong_training_setting_names_itself(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})  # type: ignore[arg-type]
