"""Two routers on the same prompts: a paired bootstrap, and whether one is not inferior.

Both answer each resample of the prompts, so what makes a resample easy or hard cancels out. A
router is not inferior by a margin if the lower end of the interval of its accuracy minus the
other's lies above minus the margin (95 %, two-sided, so 97.5 % on this side).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.calibration import OperatingPoint, Prices, StageRows, request_costs, split
from outrider.router.evaluation import BootstrapInterval, NoGapError, apgr
from outrider.router.features import FloatRows

_CONFIDENCE: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedRouter:
    """A router's estimates of labelled prompts, and its setting."""

    rows: StageRows
    point: OperatingPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A router's figures minus another's, with paired intervals."""

    accuracy: BootstrapInterval
    strong_share: BootstrapInterval
    apgr: BootstrapInterval | None
    """Of the last stages; None where the large model adds nothing."""
    cost_usd: BootstrapInterval | None
    """Mean of a request; None where tokens or prices are unknown."""
    margin: float

    @property
    def is_not_inferior(self) -> bool:
        """The accuracy is not below the other's by more than the margin."""
        return self.accuracy.low >= -self.margin


def compare(
    this: JudgedRouter,
    other: JudgedRouter,
    *,
    margin: float,
    prices: Prices | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compare two routers on the same labelled prompts. Raises ValueError for different ones."""
    if not (
        np.array_equal(this.rows.weak, other.rows.weak)
        and np.array_equal(this.rows.strong, other.rows.strong)
    ):
        raise ValueError("the routers were judged on different prompts")
    rng = np.random.default_rng(seed)
    number = len(this.rows.weak)
    samples = [rng.integers(0, number, size=number) for _ in range(num_resamples)]

    def mean(values: FloatRows) -> BootstrapInterval:
        found = [float(values[sample].mean()) for sample in samples]
        return _interval(float(values.mean()), found)

    costs = [_costs(one, prices) for one in (this, other)]
    return Comparison(
        accuracy=mean(_scores(this) - _scores(other)),
        strong_share=mean(_is_strong(this) - _is_strong(other)),
        apgr=_apgr_difference(this, other, samples),
        cost_usd=None if costs[0] is None or costs[1] is None else mean(costs[0] - costs[1]),
        margin=margin,
    )


def _is_strong(one: JudgedRouter) -> FloatRows:
    is_strong, _ = split(one.rows, one.point.threshold, one.point.band)
    return is_strong.astype(np.float64)


def _scores(one: JudgedRouter) -> FloatRows:
    scores: FloatRows = np.where(_is_strong(one) > 0.0, one.rows.strong, one.rows.weak)
    return scores


def _costs(one: JudgedRouter, prices: Prices | None) -> FloatRows | None:
    rows = one.rows
    tokens = (rows.num_prompt_tokens, rows.num_weak_tokens, rows.num_strong_tokens)
    if prices is None or any(counts is None for counts in tokens):
        return None
    return request_costs(rows, one.point, prices)


def _apgr_difference(
    this: JudgedRouter, other: JudgedRouter, samples: list[NDArray[np.int64]]
) -> BootstrapInterval | None:
    weak, strong = this.rows.weak, this.rows.strong
    gains = [1.0 - one.rows.quality(one.rows.stages[-1]) for one in (this, other)]
    found = []
    everything = np.arange(len(weak))
    for sample in (everything, *samples):
        try:
            first, second = (apgr(gain[sample], weak[sample], strong[sample]) for gain in gains)
        except NoGapError:
            if sample is everything:
                return None
            continue
        found.append(first - second)
    return _interval(found[0], found[1:])


def _interval(value: float, samples: list[float]) -> BootstrapInterval:
    if not samples:
        return BootstrapInterval(value=value, low=value, high=value)
    low, high = np.quantile(samples, _CONFIDENCE).tolist()
    return BootstrapInterval(value=value, low=low, high=high)
