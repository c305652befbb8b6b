"""Training a router with scikit-learn; what is learnt is exported to the numpy scorer.

One estimator a tier: hashed features → logistic regression → sigmoid calibration (Platt 1999), as a
scikit-learn Pipeline, so `clone`, `cross_val_score` and `GridSearchCV` work. Two of them give the
*gain* of the large model; that orders prompts better than the small model's success alone (MMLU:
APGR 0.64 against 0.59), because a prompt that both get wrong is not worth the large model.

Where the data know more than text, further stages learn on top of it: a probe on the small model's
hidden state, and the log-probabilities of its answer. A stage is kept if its gain is nearer to the
labels than the one before it, on prompts held out of both.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import sklearn
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.pipeline import Pipeline
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from outrider.router.assurance import assure, is_assured
from outrider.router.calibration import Calibration, CalibrationTarget, StageRows, calibrate
from outrider.router.dataset import LabelledPrompts, RouterDataError
from outrider.router.encoder.neighbours import Neighbours
from outrider.router.encoder.sentence import EmbeddedTexts
from outrider.router.encoder.stage import EncoderConfig, EncoderStage, mixed
from outrider.router.evaluation import NoGapError, apgr
from outrider.router.familiarity import Familiarity
from outrider.router.features import FeatureConfig, FloatRows, prompt_features
from outrider.router.label_checks import beaten_tiers
from outrider.router.scorer import MAX_PROMPT_HASHES, RouterScorer, prompt_hashes
from outrider.router.stacking import (
    ANSWER_PREFIXES,
    MIN_PER_CLASS,
    FittedStage,
    ScaledStage,
    StageData,
    answer_rows,
    assign_folds,
    fit_scaled,
    fit_stage,
    gain,
    gain_error,
    is_one_sided,
    logits_of,
)
from outrider.router.stages import labelled_rows, tier_rows
from outrider.router.tier_labels import TierLabels, completed

_MIN_ROWS = 20
_NEIGHBOUR_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a router's training."""

    features: FeatureConfig = field(default_factory=FeatureConfig)
    inverse_penalties: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Candidate values of C for the text, chosen by the squared error of the held-out gain."""
    stage_penalties: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    """The same for the probe and the answer stage."""
    num_folds: int = 5
    target: CalibrationTarget = field(default_factory=lambda: CalibrationTarget(recovered_gap=0.95))
    """Selects the router's own operating point."""
    hold_back_tokens: int = 16
    """Tokens of an answer that the calibration of a watch sees."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("inverse_penalties", "stage_penalties"):
            penalties = getattr(self, name)
            if not penalties or min(penalties) <= 0.0:
                raise ValueError(f"{name}={penalties} must be above 0")
        if not 2 <= self.num_folds <= MIN_PER_CLASS:
            raise ValueError(f"num_folds={self.num_folds} must be in [2, {MIN_PER_CLASS}]")
        if self.hold_back_tokens < 1:
            raise ValueError(f"hold_back_tokens={self.hold_back_tokens} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRouter:
    """The exported scorer, the pipelines it came from, and what they say of held-out prompts."""

    scorer: RouterScorer
    rows: StageRows
    """Every stage's qualities of the training prompts, from models that had not seen them."""
    weak: Pipeline
    """Strings in."""
    strong: Pipeline | None
    """Strings in; None without labels."""
    probe: tuple[Pipeline, ...] = ()
    """One pipeline a tier, stage inputs in; empty where the stage was not kept."""
    answer: tuple[Pipeline, ...] = ()
    """One pipeline a tier, stage inputs in; empty where the stage was not kept."""


class PromptFeatures(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Prompts (a sequence of strings) → sparse matrix [num_prompts, num_features]. Stateless."""

    def __init__(self, config: FeatureConfig | None = None) -> None:
        self.config = config

    def fit(self, X: Iterable[str], y: object = None) -> Self:
        """Learn nothing: the features are hashed."""
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


def train_router(data: LabelledPrompts, config: TrainConfig | None = None) -> TrainedRouter:
    """Fit all stages that the data allow, calibrate on held-out folds, export.

    Raises RouterDataError if there are too few rows or the small tier's labels are all alike, and
    CalibrationError if the target cannot be met or judged.
    """
    config = config or TrainConfig()
    _check(data)
    # Vectors of 17,000 numbers: a second thread only waits, and for long beside other work.
    with threadpool_limits(limits=1):
        stages = _fit_stages(data, config)
    text = stages.text.layer
    rows = labelled_rows(
        data,
        text=1.0 - gain(stages.text.held_out),
        prompt=1.0 - gain(stages.prompt_held_out),
        answer=None if stages.answer_held_out is None else 1.0 - gain(stages.answer_held_out),
        hold_back_tokens=config.hold_back_tokens,
        text_right=stages.text.held_out[0],
        last_right=(
            stages.prompt_held_out if stages.answer_held_out is None else stages.answer_held_out
        )[0],
    )
    if data.tiers is not None:
        completion = completed(data.tiers, stages.text.held_out)
        text = completion.layer(text)
        rows = tier_rows(data.tiers.rows(completion.chances(stages.text.held_out)))
        if (worthless := _worthless(data.tiers, rows)) is not None:
            return _train_without(worthless, data, config)
    calibration = calibrate(rows, config.target)
    scorer = RouterScorer(
        features=config.features,
        weight=text.weight,
        bias=text.bias,
        threshold=calibration.chosen.threshold,
        pair=data.pair,
        encoder=stages.encoder,
        probe=stages.probe.layer if stages.probe else None,
        answer=stages.answer.layer if stages.answer else None,
        calibration=calibration,
        prompt_hashes=np.unique(prompt_hashes(data.prompts))[:MAX_PROMPT_HASHES],
        tiers=None if rows.tiers is None else rows.tiers.ladder,
        assurances=(assure(rows, data.small_weights),) if is_assured(rows) else (),
        familiarity=Familiarity.of(data.prompts, config.features),
        training=_training_record(data, config, stages, calibration),
    )
    features = PromptFeatures(config.features)
    weak, *strong = (
        Pipeline([("features", features), ("classifier", head.classifier)])
        for head in stages.text.heads
    )
    return TrainedRouter(
        scorer=scorer,
        rows=rows,
        weak=weak,
        strong=strong[0] if strong else None,
        probe=stages.probe.pipelines if stages.probe else (),
        answer=stages.answer.pipelines if stages.answer else (),
    )


def _worthless(tiers: TierLabels, rows: StageRows) -> str | None:
    """Return a tier that a cheaper one beats, also where it is expected to be the better one."""
    if rows.tiers is None:
        return None
    chances, scores = rows.tiers.chances, rows.tiers.scores
    for name, _ in reversed(beaten_tiers(tiers)):
        place = tiers.names.index(name)
        rival = chances[:place].argmax(axis=0)
        prompts = np.flatnonzero(chances[place] > chances[:place].max(axis=0))
        if (scores[place] - scores[rival, np.arange(len(rival))])[prompts].sum() <= 0.0:
            return name
    return None


def _train_without(name: str, data: LabelledPrompts, config: TrainConfig) -> TrainedRouter:
    """Train without a tier, and note that; raises RouterDataError where one is left."""
    if data.tiers is None or len(data.tiers.names) == 2:
        raise RouterDataError(f"{name} is never worth its price, so there is nothing to choose")
    trained = train_router(data.for_tiers(data.tiers.without(name)), config)
    left_out = [name, *trained.scorer.training["left_out"]]
    training = {**trained.scorer.training, "left_out": left_out}
    return replace(trained, scorer=replace(trained.scorer, training=training))


def _check(data: LabelledPrompts) -> None:
    if len(data.prompts) < _MIN_ROWS:
        raise RouterDataError(f"{len(data.prompts)} rows are too few; give at least {_MIN_ROWS}")
    if is_one_sided(data.weak):
        num_right = round(float(data.weak.sum()))
        raise RouterDataError(
            f"weak_correct is 1 in {num_right} rows and 0 in {len(data.weak) - num_right}: at "
            f"least {MIN_PER_CLASS} of each are needed to learn from"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """All stages that were kept. What a stage says held out is [num_heads, num_prompts]."""

    text: FittedStage
    encoder: EncoderStage | None
    probe: ScaledStage | None
    answer: ScaledStage | None
    prompt_held_out: FloatRows
    """The quality of the last stage before the answer; the text's if there is no other."""
    answer_held_out: FloatRows | None
    """The answer stage's quality."""
    record: Mapping[str, Any]
    """Squared error of the gain and APGR, by candidate, on the same held-out prompts."""


def _training_record(
    data: LabelledPrompts, config: TrainConfig, stages: _Stages, calibration: Calibration
) -> dict[str, Any]:
    """Return what the router's file says of its training."""
    return {
        "num_rows": len(data.prompts),
        "num_duplicates": data.num_duplicates,
        "data_sha256": data.sha256,
        "weak_accuracy": float(data.weak.mean()),
        "strong_accuracy": None if data.strong is None else float(data.strong.mean()),
        "left_out": [],
        "target": asdict(config.target),
        "held_out_accuracy": calibration.chosen.accuracy,
        "held_out_strong_share": calibration.chosen.strong_share,
        "inverse_penalty": stages.text.inverse_penalty,
        "held_out": stages.record,
        "hold_back_tokens": config.hold_back_tokens,
        "seed": config.seed,
        "scikit_learn": sklearn.__version__,
    }


def _fit_stages(data: LabelledPrompts, config: TrainConfig) -> _Stages:
    scores = data.scores
    folds = assign_folds(data.prompts, scores, config.num_folds, config.seed)
    rows = StageData(
        inputs=PromptFeatures(config.features).transform(data.prompts),
        scores=scores,
        folds=folds,
        num_folds=config.num_folds,
        weights=np.ones(len(data.prompts)),
    )
    text = fit_stage(rows, config.inverse_penalties)
    record: dict[str, Any] = {"text": _figures(rows, text.held_out)}
    prompt_held_out, encoder, probe, answer, answer_held_out = text.held_out, *[None] * 4
    if data.embeddings is not None:
        kept = _fit_encoder(rows, text.held_out, data.embeddings, config, record)
        encoder, prompt_held_out = kept or (None, prompt_held_out)
    if data.hidden is not None:
        probe = _fit_probe(rows, prompt_held_out, data.hidden, config, record)
        prompt_held_out = probe.held_out if probe else prompt_held_out
    if data.logprobs is not None:
        answer, answer_held_out = _fit_answer(rows, prompt_held_out, data.logprobs, config, record)
    return _Stages(
        text=text,
        encoder=encoder,
        probe=probe,
        answer=answer,
        prompt_held_out=prompt_held_out,
        answer_held_out=answer_held_out,
        record=record,
    )


def _fit_encoder(
    rows: StageData,
    text_held_out: FloatRows,
    embeddings: EmbeddedTexts,
    config: TrainConfig,
    record: dict[str, Any],
) -> tuple[EncoderStage, FloatRows] | None:
    """What neighbours say beside the text, and this held out; None if the text alone is better."""
    shares = np.zeros((len(embeddings.rows), len(rows.scores)))
    for fold in range(config.num_folds):
        is_out = rows.folds == fold
        others = [tier[~is_out] for tier in rows.scores]
        known = Neighbours.of(embeddings.rows[~is_out], others, config.seed)
        shares[is_out] = known.shares(embeddings.rows[is_out])
    record["neighbours"] = _figures(rows, shares.T)
    held_out = {share: mixed(text_held_out, shares.T, share) for share in _NEIGHBOUR_SHARES}
    errors = {
        share: gain_error(rows.scores, judged, rows.weights) for share, judged in held_out.items()
    }
    best = min(errors, key=errors.__getitem__)
    record["text_and_neighbours"] = {"share": best, **_figures(rows, held_out[best])}
    if errors[best] >= record["text"]["gain_error"]:
        return None
    neighbours = Neighbours.of(embeddings.rows, rows.scores, config.seed)
    found = EncoderConfig(id=embeddings.id, share=best)
    return EncoderStage(config=found, neighbours=neighbours), held_out[best]


def _fit_probe(
    rows: StageData,
    before: FloatRows,
    hidden: FloatRows,
    config: TrainConfig,
    record: dict[str, Any],
) -> ScaledStage | None:
    """The better of the probe alone and beside what was said `before`; None if that is better."""
    logits = logits_of(before)
    candidates = {
        # Columns of zeros get the weight 0: the probe alone has the same inputs.
        "probe": np.hstack((np.zeros_like(logits), hidden)),
        "text_and_probe": np.hstack((logits, hidden)),
    }
    best, best_error = None, gain_error(rows.scores, before, rows.weights)
    for name, inputs in candidates.items():
        stage = fit_scaled(replace(rows, inputs=inputs), config.stage_penalties)
        record[name] = _figures(rows, stage.held_out)
        if record[name]["gain_error"] < best_error:
            best, best_error = stage, record[name]["gain_error"]
    return best


def _fit_answer(
    rows: StageData,
    prompt_held_out: FloatRows,
    logprobs: list[FloatRows],
    config: TrainConfig,
    record: dict[str, Any],
) -> tuple[ScaledStage | None, FloatRows | None]:
    """The answer stage and what it says at the end of the hold-back, [num_heads, num_prompts].

    Both None if it does not improve on the prompt. A prompt counts once, however long its answer.
    """
    prefixes = sorted({*ANSWER_PREFIXES, config.hold_back_tokens})
    seen = answer_rows(logits_of(prompt_held_out), logprobs, prefixes)
    answers = StageData(
        inputs=seen.inputs,
        scores=[tier[seen.prompts] for tier in rows.scores],
        folds=rows.folds[seen.prompts],
        num_folds=rows.num_folds,
        weights=1.0 / np.bincount(seen.prompts)[seen.prompts],
    )
    stage = fit_scaled(answers, config.stage_penalties)
    whole = stage.held_out[:, seen.lengths == 0]
    at_hold_back = whole.copy()
    is_cut = seen.lengths == config.hold_back_tokens
    at_hold_back[:, seen.prompts[is_cut]] = stage.held_out[:, is_cut]
    record["answer_at_hold_back"] = _figures(rows, at_hold_back)
    record["answer_whole"] = _figures(rows, whole)
    before = prompt_held_out[:, seen.prompts]
    if stage.gain_error >= gain_error(answers.scores, before, answers.weights):
        return None, None
    return stage, at_hold_back


def _figures(rows: StageData, held_out: FloatRows) -> dict[str, float | None]:
    judged = gain(held_out)
    weak, strong = rows.scores[0], gain(rows.scores) + rows.scores[0]
    try:
        area: float | None = apgr(judged, weak, strong)
    except NoGapError:
        area = None
    return {"gain_error": gain_error(rows.scores, held_out, rows.weights), "apgr": area}
