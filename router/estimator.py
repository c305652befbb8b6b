"""Training a router with scikit-learn; what is learnt is exported to the numpy scorer.

One estimator a tier: hashed features → logistic regression → sigmoid calibration (Platt 1999), as a
scikit-learn Pipeline, so `clone`, `cross_val_score` and `GridSearchCV` work. Two of them give the
*gain* of the large model; that orders prompts better than the small model's success alone (MMLU:
APGR 0.64 against 0.59), because a prompt that both get wrong is not worth the large model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import sklearn
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import Pipeline
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from router.dataset import LabelledPrompts, RouterDataError
from router.evaluation import choose_threshold
from router.features import FeatureConfig, Floats, prompt_features
from router.scorer import RouterScorer

_MIN_ROWS = 20
_MIN_PER_CLASS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a router is trained.

    `inverse_penalties`: values of C among which the squared error of the held-out gain chooses.
    `recovered_gap`: the share of the quality gap that the threshold is to recover.
    """

    features: FeatureConfig = field(default_factory=FeatureConfig)
    inverse_penalties: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    num_folds: int = 5
    recovered_gap: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not self.inverse_penalties or min(self.inverse_penalties) <= 0.0:
            raise ValueError(f"inverse_penalties={self.inverse_penalties} must be above 0")
        if not 2 <= self.num_folds <= _MIN_PER_CLASS:
            raise ValueError(f"num_folds={self.num_folds} must be in [2, {_MIN_PER_CLASS}]")
        if not 0.0 < self.recovered_gap <= 1.0:
            raise ValueError(f"recovered_gap={self.recovered_gap} must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRouter:
    """The exported scorer and the pipelines it came from (`strong`: None if it has no labels)."""

    scorer: RouterScorer
    weak: Pipeline
    strong: Pipeline | None


class PromptFeatures(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Prompts (a sequence of strings) → sparse matrix [num_prompts, num_features]. Stateless."""

    def __init__(self, config: FeatureConfig | None = None) -> None:
        self.config = config

    def fit(self, X: Iterable[str], y: object = None) -> Self:
        """Nothing to learn: the features are hashed."""
        del X, y
        return self

    def transform(self, X: Iterable[str]) -> csr_matrix:
        """Rows in the order of the prompts."""
        config = self.config or FeatureConfig()
        vectors = [prompt_features(text, config) for text in X]
        row_indptr = np.cumsum([0, *(len(vector.indices) for vector in vectors)])
        empty: list[Any] = [np.zeros(0)]
        return csr_matrix(
            (
                np.concatenate(empty + [vector.values for vector in vectors]),
                np.concatenate(empty + [vector.indices for vector in vectors]).astype(np.int64),
                row_indptr,
            ),
            shape=(len(vectors), config.num_features),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return True


class ConstantClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """P(1) = `probability` for every row: for labels too one-sided to learn from."""

    def __init__(self, probability: float = 0.5) -> None:
        self.probability = probability

    def fit(self, X: csr_matrix, y: Floats) -> Self:
        """Nothing to learn."""
        del X, y
        self.classes_ = np.array([0.0, 1.0])
        return self

    def predict_proba(self, X: csr_matrix) -> Floats:
        """[num_rows, 2]"""
        row = np.array([1.0 - self.probability, self.probability])
        return np.tile(row, (X.shape[0], 1))

    def predict(self, X: csr_matrix) -> Floats:
        """[num_rows], 0.0 or 1.0"""
        return np.full(X.shape[0], float(self.probability >= 0.5))


def quality_estimator(
    *, inverse_penalty: float = 0.3, config: TrainConfig | None = None
) -> Pipeline:
    """An unfitted estimator of P(a tier's answer is right | prompt): strings in, 0/1 labels."""
    config = config or TrainConfig()
    return _pipeline(_calibrated(inverse_penalty, config), config)


def train_router(data: LabelledPrompts, config: TrainConfig | None = None) -> TrainedRouter:
    """Fit both tiers' estimators, choose the threshold on held-out folds, export.

    Raises RouterDataError if there are too few rows or the small tier's labels are all alike.
    """
    config = config or TrainConfig()
    _check(data)
    matrix = PromptFeatures(config.features).transform(data.prompts)
    tiers = [data.weak] if data.strong is None else [data.weak, data.strong]
    # Vectors of 17,000 numbers: a second thread only waits, and for long beside other work.
    with threadpool_limits(limits=1):
        penalty, held_out = _best_penalty(matrix, tiers, config)
        heads = [_fit_head(matrix, labels, penalty, config) for labels in tiers]
    # Without labels the large model is taken to be never wrong.
    strong_labels = np.ones_like(data.weak) if data.strong is None else data.strong
    gain = _gain(held_out)
    threshold = choose_threshold(gain, data.weak, strong_labels, config.recovered_gap)
    is_strong = 1.0 - gain < threshold
    scorer = RouterScorer(
        features=config.features,
        weight=np.stack([head.weight for head in heads]),
        bias=np.array([head.bias for head in heads]),
        threshold=threshold,
        training={
            "num_rows": len(data.prompts),
            "num_duplicates": data.num_duplicates,
            "data_sha256": data.sha256,
            "weak_accuracy": float(data.weak.mean()),
            "strong_accuracy": None if data.strong is None else float(data.strong.mean()),
            "recovered_gap": config.recovered_gap,
            "held_out_accuracy": float(np.where(is_strong, strong_labels, data.weak).mean()),
            "held_out_strong_share": float(is_strong.mean()),
            "inverse_penalty": penalty,
            "seed": config.seed,
            "scikit_learn": sklearn.__version__,
        },
    )
    weak, *strong = (_pipeline(head.classifier, config) for head in heads)
    return TrainedRouter(scorer=scorer, weak=weak, strong=strong[0] if strong else None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Head:
    """One tier: the fitted classifier and the linear layer [num_features] that it amounts to."""

    classifier: ClassifierMixin
    weight: Floats
    bias: float


def _check(data: LabelledPrompts) -> None:
    if len(data.prompts) < _MIN_ROWS:
        raise RouterDataError(f"{len(data.prompts)} rows are too few, {_MIN_ROWS} at least")
    num_right = int(data.weak.sum())
    if _is_one_sided(data.weak):
        raise RouterDataError(
            f"weak_correct is 1 in {num_right} rows and 0 in {len(data.weak) - num_right}: at "
            f"least {_MIN_PER_CLASS} of each are needed to learn from"
        )


def _best_penalty(
    matrix: csr_matrix, tiers: list[Floats], config: TrainConfig
) -> tuple[float, list[Floats]]:
    """The C whose held-out gain is nearest to the labels, and its held-out probabilities.

    Each tier's own log loss would choose a weaker penalty: right for each probability, worse for
    their difference (MMLU: APGR 0.630 against 0.645).
    """
    candidates = []
    for penalty in config.inverse_penalties:
        held_out = [_held_out(matrix, labels, penalty, config) for labels in tiers]
        error = float(np.mean((_gain(tiers) - _gain(held_out)) ** 2))
        candidates.append((error, penalty, held_out))
    _, penalty, held_out = min(candidates, key=lambda candidate: candidate[:2])
    return penalty, held_out


def _gain(tiers: list[Floats]) -> Floats:
    """Large minus small, [num_prompts]; an unlabelled large tier is never wrong."""
    return (tiers[1] if len(tiers) == 2 else np.ones_like(tiers[0])) - tiers[0]


def _held_out(matrix: csr_matrix, labels: Floats, penalty: float, config: TrainConfig) -> Floats:
    """Calibrated probabilities, each row's from a model that has not seen it: [num_prompts]."""
    if _is_one_sided(labels):
        return np.full(len(labels), _laplace(labels))
    scores = cross_val_predict(
        _logistic(penalty), matrix, labels, cv=_folds(config), method="decision_function"
    )
    # Two parameters for all rows: fitted on the rows that they calibrate they do no harm.
    platt = LogisticRegression(C=1e6).fit(scores[:, None], labels)
    probabilities: Floats = platt.predict_proba(scores[:, None])[:, 1]
    return probabilities


def _fit_head(matrix: csr_matrix, labels: Floats, penalty: float, config: TrainConfig) -> _Head:
    if _is_one_sided(labels):
        prior = _laplace(labels)
        return _Head(
            classifier=ConstantClassifier(prior).fit(matrix, labels),
            weight=np.zeros(matrix.shape[1]),
            bias=float(np.log(prior / (1.0 - prior))),
        )
    model = _calibrated(penalty, config).fit(matrix, labels)
    (fitted,) = model.calibrated_classifiers_
    (platt,) = fitted.calibrators
    # P = 1 / (1 + exp(a * (weight @ x + bias) + b)), so the logit is linear in x.
    return _Head(
        classifier=model,
        weight=-platt.a_ * fitted.estimator.coef_[0],
        bias=float(-(platt.a_ * fitted.estimator.intercept_[0] + platt.b_)),
    )


def _is_one_sided(labels: Floats) -> bool:
    """Whether one class has too few rows to learn from."""
    return bool(min(labels.sum(), len(labels) - labels.sum()) < _MIN_PER_CLASS)


def _laplace(labels: Floats) -> float:
    """The share of ones, kept off 0 and 1."""
    return float((labels.sum() + 1.0) / (len(labels) + 2.0))


def _logistic(inverse_penalty: float) -> LogisticRegression:
    return LogisticRegression(C=inverse_penalty, max_iter=5000)


def _calibrated(inverse_penalty: float, config: TrainConfig) -> CalibratedClassifierCV:
    # One model on all rows, calibrated on out-of-fold scores: exports as one linear layer.
    return CalibratedClassifierCV(
        _logistic(inverse_penalty), method="sigmoid", cv=_folds(config), ensemble=False
    )


def _folds(config: TrainConfig) -> StratifiedKFold:
    return StratifiedKFold(config.num_folds, shuffle=True, random_state=config.seed)


def _pipeline(classifier: ClassifierMixin, config: TrainConfig) -> Pipeline:
    return Pipeline([("features", PromptFeatures(config.features)), ("classifier", classifier)])
