"""Fitting one stage of a router: a calibrated linear classifier a tier, and what it says held out.

Stages are stacked (Wolpert, "Stacked generalization", 1992): what a stage says of a prompt, as the
next one learns from it, comes from a model that has not seen the prompt. All stages share the
folds, so a row that is held out in one is held out in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from outrider.router.answer_features import answer_features, answer_inputs
from outrider.router.estimates import LinearStage, bounded_logit
from outrider.router.features import FloatRows

_Ints = NDArray[np.intp]
# A csr_matrix or Floats; scipy comes without types.
Matrix: TypeAlias = Any

MIN_PER_CLASS: Final = 5
_MIN_SCALE: Final = 0.05
# How much of an answer the answer stage learns from; whole answers come on top.
ANSWER_PREFIXES: Final = (1, 2, 4, 8, 16, 32, 64)


class ConstantClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """P(1) = `probability` for every row: for labels too one-sided to learn from."""

    def __init__(self, probability: float = 0.5) -> None:
        self.probability = probability

    def fit(self, X: Matrix, y: FloatRows) -> Self:
        """Learn nothing."""
        del X, y
        self.classes_ = np.array([0.0, 1.0])
        return self

    def predict_proba(self, X: Matrix) -> FloatRows:
        """[num_rows, 2]"""
        row = np.array([1.0 - self.probability, self.probability])
        return np.tile(row, (X.shape[0], 1))

    def predict(self, X: Matrix) -> FloatRows:
        """[num_rows], 0.0 or 1.0"""
        return np.full(X.shape[0], float(self.probability >= 0.5))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageData:
    """Training data of a stage, row by row."""

    inputs: Matrix
    """[num_rows, num_inputs]."""
    scores: Sequence[FloatRows]
    """Each tier's, in [0, 1], [num_rows]. A second tier may be missing and then counts as always
    right."""
    folds: _Ints
    """The one of `num_folds` that holds a row out, [num_rows]."""
    num_folds: int
    weights: FloatRows
    """Weight of each row, [num_rows]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageHead:
    """One tier: the fitted classifier and the linear layer [num_inputs] that it amounts to."""

    classifier: ClassifierMixin
    weight: FloatRows
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedStage:
    """One head a tier, and calibrated probabilities from models that have not seen the row."""

    heads: Sequence[StageHead]
    held_out: FloatRows
    """[num_heads, num_rows]."""
    inverse_penalty: float
    gain_error: float
    """Mean squared error of the held-out gain."""

    @property
    def layer(self) -> LinearStage:
        """Return the stage as the scorer holds it."""
        return LinearStage(
            weight=np.stack([head.weight for head in self.heads]),
            bias=np.array([head.bias for head in self.heads]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledStage:
    """A stage on standardised inputs; `layer` takes them as they are, the scaling folded in."""

    fitted: FittedStage
    scaler: StandardScaler
    layer: LinearStage

    @property
    def held_out(self) -> FloatRows:
        """[num_heads, num_rows]"""
        return self.fitted.held_out

    @property
    def gain_error(self) -> float:
        """Mean squared error of the held-out gain."""
        return self.fitted.gain_error

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Return a pipeline for each tier; they take the inputs as they are."""
        return tuple(
            Pipeline([("scale", self.scaler), ("classifier", head.classifier)])
            for head in self.fitted.heads
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerRows:
    """Inputs of the answer stage: each answer's beginnings, and the whole."""

    inputs: FloatRows
    """[num_rows, num_inputs]."""
    prompts: _Ints
    """Index of the answer's prompt, [num_rows]."""
    lengths: _Ints
    """Tokens seen, 0 for the whole answer, [num_rows]."""


def logistic(inverse_penalty: float) -> LogisticRegression:
    """The classifier under the calibration."""
    return LogisticRegression(C=inverse_penalty, max_iter=5000)


def calibrated(
    inverse_penalty: float, folds: StratifiedKFold | Sequence[tuple[_Ints, _Ints]]
) -> CalibratedClassifierCV:
    """Make a model of all rows, calibrated on out-of-fold scores: exports as one linear layer."""
    return CalibratedClassifierCV(
        logistic(inverse_penalty), method="sigmoid", cv=folds, ensemble=False
    )


def assign_folds(
    prompts: Sequence[str], scores: Sequence[FloatRows], num_folds: int, seed: int
) -> _Ints:
    """The fold of each prompt, [num_prompts].

    Rows of one prompt share a fold, and labels are spread evenly: prompts are shuffled, ordered by
    their labels, and dealt out in turn.
    """
    first_rows: dict[str, int] = {}
    for row, prompt in enumerate(prompts):
        first_rows.setdefault(prompt, row)
    rows = np.random.default_rng(seed).permutation(list(first_rows.values()))
    labels = [tier[rows] >= 0.5 for tier in scores]
    order = rows[np.lexsort(labels)]
    fold_of = {prompts[row]: place % num_folds for place, row in enumerate(order)}
    return np.array([fold_of[prompt] for prompt in prompts], dtype=np.intp)


def fit_stage(data: StageData, inverse_penalties: Sequence[float]) -> FittedStage:
    """Fit with a penalty chosen by the squared error of the held-out gain.

    Each tier's own log loss would choose a weaker penalty: right for each probability, worse for
    their difference (MMLU: APGR 0.630 against 0.645). Of the penalties whose error is within one
    standard error of the best, the strongest is taken (Breiman et al., "Classification and
    Regression Trees", 1984): their order is chance, and the simpler model carries further.
    """
    held_out, errors = {}, {}
    for penalty in inverse_penalties:
        judged = np.stack([_held_out(data, scores, penalty) for scores in data.scores])
        held_out[penalty], errors[penalty] = judged, _squared_errors(data.scores, judged)
    best = min(errors, key=lambda penalty: float(np.average(errors[penalty], weights=data.weights)))
    chosen = min(
        penalty for penalty, error in errors.items() if _is_near(error - errors[best], data.weights)
    )
    return FittedStage(
        heads=[_fit_head(data, scores, chosen) for scores in data.scores],
        held_out=held_out[chosen],
        inverse_penalty=chosen,
        gain_error=float(np.average(errors[chosen], weights=data.weights)),
    )


def gain_error(
    scores: Sequence[FloatRows], judged: Sequence[FloatRows] | FloatRows, weights: FloatRows
) -> float:
    """Mean squared error of the gains; `scores` and `judged` hold the tiers' [num_rows]."""
    return float(np.average(_squared_errors(scores, judged), weights=weights))


def gain(tiers: Sequence[FloatRows] | FloatRows) -> FloatRows:
    """Dearest minus cheapest, [num_rows]; an unlabelled large tier is never wrong."""
    large: FloatRows = tiers[-1] if len(tiers) > 1 else np.ones_like(tiers[0])
    return large - tiers[0]


def _squared_errors(
    scores: Sequence[FloatRows], judged: Sequence[FloatRows] | FloatRows
) -> FloatRows:
    """Return the squared error of what each tier adds to the next cheaper one, the mean of all."""
    pairs = range(max(len(scores) - 1, 1))
    errors = [(gain(scores[at : at + 2]) - gain(judged[at : at + 2])) ** 2 for at in pairs]
    mean: FloatRows = np.mean(errors, axis=0)
    return mean


def is_one_sided(scores: FloatRows) -> bool:
    """Return whether one class has too few rows to learn from."""
    return bool(min(scores.sum(), len(scores) - scores.sum()) < MIN_PER_CLASS)


def fit_scaled(data: StageData, inverse_penalties: Sequence[float]) -> ScaledStage:
    """`fit_stage` on dense inputs of any scale."""
    scaler = StandardScaler().fit(data.inputs)
    # An input that hardly varies here (the logit of a tier that is nearly always right) differs a
    # little in the stage before once that is fitted on all rows; scaled up it would decide alone.
    scaler.scale_ = np.maximum(scaler.scale_, _MIN_SCALE)
    fitted = fit_stage(replace(data, inputs=scaler.transform(data.inputs)), inverse_penalties)
    weight = fitted.layer.weight / scaler.scale_
    layer = LinearStage(weight=weight, bias=fitted.layer.bias - weight @ scaler.mean_)
    return ScaledStage(fitted=fitted, scaler=scaler, layer=layer)


def logits_of(probabilities: FloatRows) -> FloatRows:
    """[num_rows, num_heads] as the next stage sees them, of probabilities [num_heads, num_rows]."""
    logits: FloatRows = np.vectorize(bounded_logit, otypes=[np.float64])(probabilities.T)
    return logits


def answer_rows(
    prompt_logits: FloatRows, logprobs: Sequence[FloatRows], prefixes: Sequence[int]
) -> AnswerRows:
    """Every beginning of `prefixes` tokens that an answer has, then the whole, prompt by prompt.

    `prompt_logits`: [num_prompts, num_heads].
    """
    inputs, owners, lengths = [], [], []
    for owner, (logits, answer) in enumerate(zip(prompt_logits, logprobs, strict=True)):
        for length in (*(size for size in prefixes if size <= len(answer)), 0):
            seen = answer_features(answer[:length] if length else answer, is_whole=not length)
            inputs.append(answer_inputs(logits, seen))
            owners.append(owner)
            lengths.append(length)
    return AnswerRows(inputs=np.array(inputs), prompts=np.array(owners), lengths=np.array(lengths))


def _is_near(excess: FloatRows, weights: FloatRows) -> bool:
    """Return whether the mean of `excess` [num_rows] is within one standard error of 0."""
    shares = weights / weights.sum()
    mean = float(shares @ excess)
    return mean <= float(np.sqrt(shares**2 @ (excess - mean) ** 2))


def _held_out(data: StageData, scores: FloatRows, penalty: float) -> FloatRows:
    """Calibrated probabilities, each row's from a model that has not seen it: [num_rows]."""
    if is_one_sided(scores):
        return np.full(len(scores), _laplace(scores))
    margins = np.zeros(len(scores))
    for fold in range(data.num_folds):
        is_held_out = data.folds == fold
        rows, labels, weights = _graded(scores, data.weights, ~is_held_out)
        model = logistic(penalty).fit(data.inputs[rows], labels, sample_weight=weights)
        margins[is_held_out] = model.decision_function(data.inputs[is_held_out])
    # Two parameters for all rows: fitted on the rows that they calibrate they do no harm.
    rows, labels, weights = _graded(scores, data.weights)
    platt = LogisticRegression(C=1e6).fit(margins[rows, None], labels, sample_weight=weights)
    probabilities: FloatRows = platt.predict_proba(margins[:, None])[:, 1]
    return probabilities


def _fit_head(data: StageData, scores: FloatRows, penalty: float) -> StageHead:
    if is_one_sided(scores):
        prior = _laplace(scores)
        return StageHead(
            classifier=ConstantClassifier(prior).fit(data.inputs, scores),
            weight=np.zeros(data.inputs.shape[1]),
            bias=float(np.log(prior / (1.0 - prior))),
        )
    rows, labels, weights = _graded(scores, data.weights)
    folds = data.folds[rows]
    splits = [
        (np.flatnonzero(folds != fold), np.flatnonzero(folds == fold))
        for fold in range(data.num_folds)
    ]
    model = calibrated(penalty, splits).fit(data.inputs[rows], labels, sample_weight=weights)
    (fitted,) = model.calibrated_classifiers_
    (platt,) = fitted.calibrators
    # P = 1 / (1 + exp(a * (weight @ x + bias) + b)), so the logit is linear in x.
    return StageHead(
        classifier=model,
        weight=-platt.a_ * fitted.estimator.coef_[0],
        bias=float(-(platt.a_ * fitted.estimator.intercept_[0] + platt.b_)),
    )


def _graded(
    scores: FloatRows, weights: FloatRows, is_wanted: NDArray[np.bool_] | None = None
) -> tuple[_Ints, FloatRows, FloatRows]:
    """Rows, their labels 0 or 1, and weights, such that a classifier can learn scores in between.

    A score s in (0, 1) becomes a 1 with weight s and a 0 with weight 1 - s: the log loss is the
    same as that of the score itself.
    """
    rows = np.arange(len(scores)) if is_wanted is None else np.flatnonzero(is_wanted)
    between = rows[(scores[rows] > 0.0) & (scores[rows] < 1.0)]
    is_one = scores[rows] > 0.0
    shares = np.where(is_one, scores[rows], 1.0)
    return (
        np.concatenate((rows, between)),
        np.concatenate((is_one.astype(np.float64), np.zeros(len(between)))),
        np.concatenate((weights[rows] * shares, weights[between] * (1.0 - scores[between]))),
    )


def _laplace(scores: FloatRows) -> float:
    """The share of ones, kept off 0 and 1."""
    return float((scores.sum() + 1.0) / (len(scores) + 2.0))
