"""Fits the expected costs of a `Worth` to labelled prompts: rates by least squares, lengths by
ridge regression, judged on prompts that were held out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.calibration import CalibrationError, Prices, StageRows, needed
from outrider.router.costs import TokenPrices
from outrider.router.dataset import LabelledPrompts
from outrider.router.features import FeatureConfig, FloatRows, SparseVector, prompt_features
from outrider.router.worth import (
    CostModel,
    CostRates,
    CostUnit,
    ExpectedTokens,
    PairRates,
    Worth,
    answer_lengths,
)

_MIN_ROWS: Final = 20
_MAX_ROWS: Final = 2048  # the regression solves for one number a row
_NUM_FOLDS: Final = 5
_PENALTY: Final = 0.3  # each n-gram block of the features has norm 1
_CHEAPEST: Final = 0.05
_PRICE_UNIT: Final = 1e-6  # prices are for a million tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthErrors:
    """Mean distances in tokens from the large model's answers, on prompts that were held out."""

    predicted: float
    usual: float
    """Of the median length, as of one answer like the others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedWorth:
    """A worth, and what it expects of the prompts that it was fitted to, each held out."""

    worth: Worth
    tokens: tuple[ExpectedTokens, ...]
    errors: LengthErrors

    def weighed(self, rows: StageRows) -> StageRows:
        """Return the rows with the expected costs of their prompts."""
        return with_costs(rows, self.worth, self.tokens)


def fit_worth(
    data: LabelledPrompts, features: FeatureConfig, unit: CostUnit, prices: Prices | None
) -> FittedWorth:
    """Learn what prompts cost. Raises CalibrationError where the data or prices do not tell."""
    weak = needed(data.num_weak_tokens, "weak_tokens")
    strong = needed(data.num_strong_tokens, "strong_tokens")
    prompt = needed(data.num_prompt_tokens, "prompt_tokens")
    if unit == "second":
        needed(data.weak_s, "weak_s")
        needed(data.strong_s, "strong_s")
    elif prices is None:
        raise CalibrationError("a gain per dollar needs the prices of both tiers")
    if len(prompt) < _MIN_ROWS:
        raise CalibrationError(f"expected costs need {_MIN_ROWS} prompts, not {len(prompt)}")
    vectors = [prompt_features(text, features) for text in data.prompts]
    lengths = _Lengths(vectors, features.num_features, np.log1p(np.stack((weak, strong))))
    chars = np.array([float(len(text)) for text in data.prompts])
    per_char, at_start = _line(chars, prompt)
    held_out = _tokens(at_start + per_char * chars, answer_lengths(lengths.held_out))
    weight, bias = lengths.whole()
    model = _model(data, unit, prices, held_out, (at_start, per_char))
    return FittedWorth(
        worth=Worth(model=model, length_weight=weight, length_bias=bias),
        tokens=held_out,
        errors=LengthErrors(
            predicted=float(np.abs([one.large for one in held_out] - strong).mean()),
            usual=float(np.abs(np.median(strong) - strong).mean()),
        ),
    )


def with_costs(rows: StageRows, worth: Worth, tokens: Sequence[ExpectedTokens]) -> StageRows:
    """The rows with expected costs, in the worth's unit."""
    unit, held = worth.model.unit, rows.hold_back_tokens
    costs = [
        known
        for one in tokens
        if (known := worth.costs(one, unit, hold_back_tokens=held)) is not None
    ]
    return replace(
        rows,
        small_cost=np.array([one.small for one in costs]),
        begun_cost=np.array([one.begun for one in costs]),
        large_cost=np.array([one.large for one in costs]),
        reference_cost=worth.model.reference,
    )


def _tokens(prompt: FloatRows, answers: FloatRows) -> tuple[ExpectedTokens, ...]:
    small, large = answers.tolist()
    return tuple(
        ExpectedTokens(prompt=one, small=first, large=second)
        for one, first, second in zip(prompt.tolist(), small, large, strict=True)
    )


def _model(
    data: LabelledPrompts,
    unit: CostUnit,
    prices: Prices | None,
    tokens: Sequence[ExpectedTokens],
    prompt_line: tuple[float, float],
) -> CostModel:
    prompt, weak, strong = data.num_prompt_tokens, data.num_weak_tokens, data.num_strong_tokens
    seconds = None
    if data.weak_s is not None and data.strong_s is not None:
        seconds = PairRates(
            small=fit_rates(needed(prompt, "prompt_tokens"), needed(weak, ""), data.weak_s),
            large=fit_rates(needed(prompt, "prompt_tokens"), needed(strong, ""), data.strong_s),
        )
    dollars = None
    if prices is not None:
        dollars = PairRates(small=_priced(prices["small"]), large=_priced(prices["large"]))
    rates = seconds if unit == "second" else dollars
    if rates is None:  # both were asked for above
        raise CalibrationError(f"there are no rates in {unit}s")
    extra = [
        rates.large.cost(one.prompt, one.large) - rates.small.cost(one.prompt, one.small)
        for one in tokens
    ]
    reference = float(np.quantile(extra, _CHEAPEST))
    if reference <= 0.0:
        raise CalibrationError(
            f"the large model costs no more {unit}s than the small one on many of these prompts, "
            "so a gain cannot be weighed by them"
        )
    return CostModel(
        unit=unit,
        seconds=seconds,
        dollars=dollars,
        tokens_at_start=prompt_line[0],
        tokens_per_char=prompt_line[1],
        reference=reference,
    )


def fit_rates(num_prompt: FloatRows, num_answer: FloatRows, seconds: FloatRows) -> CostRates:
    """Return the rates, none below 0, with the least squared error of `seconds`."""
    columns = np.stack((np.ones_like(num_prompt), num_prompt, num_answer), axis=1)
    best, best_error = np.zeros(3), np.inf
    for size in range(1, 4):
        for chosen in combinations(range(3), size):
            found = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
            error = float(((columns[:, chosen] @ found - seconds) ** 2).sum())
            if found.min() >= 0.0 and error < best_error:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = found
    request, prompt_token, answer_token = best.tolist()
    return CostRates(request=request, prompt_token=prompt_token, answer_token=answer_token)


def _priced(prices: TokenPrices) -> CostRates:
    return CostRates(
        request=0.0,
        prompt_token=_PRICE_UNIT * prices.prompt,
        answer_token=_PRICE_UNIT * prices.completion,
    )


def _line(x: FloatRows, y: FloatRows) -> tuple[float, float]:
    """Slope and height at 0 of y over x, neither below 0."""
    rates = fit_rates(x, np.zeros_like(x), y)
    return rates.prompt_token, rates.request


class _Lengths:
    """Ridge regression of both tiers' logarithms, in its dual form: few prompts, many features."""

    def __init__(self, vectors: Sequence[SparseVector], num_features: int, logs: FloatRows) -> None:
        """`logs`: [2, num_prompts]."""
        places = np.linspace(0, len(vectors) - 1, min(len(vectors), _MAX_ROWS)).astype(np.intp)
        self._inputs = np.zeros((len(places), num_features), dtype=np.float32)
        for row, place in zip(self._inputs, places.tolist(), strict=True):
            row[vectors[place].indices] = vectors[place].values
        self._kernel = (self._inputs @ self._inputs.T).astype(np.float64)
        self._logs = logs[:, places]
        self.held_out = self._held_out(vectors, places)

    def whole(self) -> tuple[FloatRows, FloatRows]:
        """Weight [2, num_features] and bias [2] from all prompts."""
        return self._weights(np.arange(len(self._inputs)))

    def _weights(self, rows: NDArray[np.intp]) -> tuple[FloatRows, FloatRows]:
        logs = self._logs[:, rows]
        bias = logs.mean(axis=1)
        kernel = self._kernel[np.ix_(rows, rows)] + _PENALTY * np.eye(len(rows))
        dual = np.linalg.solve(kernel, (logs - bias[:, None]).T)
        return dual.T @ self._inputs[rows], bias

    def _held_out(self, vectors: Sequence[SparseVector], places: NDArray[np.intp]) -> FloatRows:
        """Of every prompt, by the regression that has not seen it: [2, num_prompts]."""
        found = np.zeros((2, len(vectors)))
        folds = np.arange(len(vectors)) % _NUM_FOLDS
        for fold in range(_NUM_FOLDS):
            weight, bias = self._weights(np.flatnonzero(folds[places] != fold))
            for place in np.flatnonzero(folds == fold).tolist():
                vector = vectors[place]
                found[:, place] = weight[:, vector.indices] @ vector.values + bias
        return found
