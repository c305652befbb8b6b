"""How many requests an experiment takes until it is decided, simulated with its own intervals.

Simulated experiments are looked at whenever their requests have grown by 4 %. Requests of one unit
that are alike count for less: by the design effect 1 + (m - 1) r, for m requests of a unit with the
correlation r (Kish 1965).
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from outrider.gateway.experiments.statistics.binomial import are_different
from outrider.gateway.experiments.statistics.means import MIN_REQUESTS, reach_of_difference
from outrider.gateway.experiments.statistics.mixture import FloatArray, prior_requests

SizeMetric = Literal["share", "mean"]
DECIDED_SHARES: Final = (0.5, 0.8, 0.95)
MAX_REQUESTS: Final = 100_000_000

_NUM_SIMULATED: Final = 1000
_GROWTH: Final = 1.04
_FIRST: Final = 2 * MIN_REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuestion:
    """A control and an arm that really differ."""

    kind: SizeMetric
    """share: `control` and `arm` are shares. mean: they are means above 0."""
    control: float
    arm: float
    weight: float = 0.5
    """The arm's share of their requests."""
    alpha: float = 0.05
    num_comparisons: int = 1
    """Arms beside the control."""
    variation: float = 0.7
    """The standard deviation over the mean."""
    requests_per_unit: float = 1.0
    correlation: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that no experiment has."""
        low, high = (0.0, 1.0) if self.kind == "share" else (0.0, float("inf"))
        for name, value in (("control", self.control), ("arm", self.arm)):
            if not low < value < high:
                span = "between 0 and 1" if self.kind == "share" else "above 0"
                raise ValueError(f"{name} = {value:g} must be {span}")
        if self.control == self.arm:
            raise ValueError("equal arms are never told apart: name two different values")
        if not 0.0 < self.weight < 1.0 or not 0.0 < self.alpha < 1.0:
            raise ValueError("weight and alpha must be between 0 and 1")
        if self.num_comparisons < 1 or self.requests_per_unit < 1.0 or self.variation <= 0.0:
            raise ValueError("there is at least one arm, one request of a unit, and some variation")
        if not 0.0 <= self.correlation <= 1.0:
            raise ValueError(f"correlation = {self.correlation:g} must be between 0 and 1")

    @property
    def design_effect(self) -> float:
        """Requests that count as one, because those of a unit are alike."""
        return 1.0 + (self.requests_per_unit - 1.0) * self.correlation


def requests_needed(question: SizeQuestion, *, seed: int = 0) -> dict[float, int | None]:
    """Return requests of control and arm together until so large a share of experiments is decided.

    Keys are `DECIDED_SHARES`; None where MAX_REQUESTS do not suffice.
    """
    rng = np.random.default_rng(seed)
    sizes = _sizes()
    decided = (_shares if question.kind == "share" else _means)(question, sizes, rng)
    found: dict[float, int | None] = {}
    for share in DECIDED_SHARES:
        enough = np.flatnonzero(decided >= share)
        needed = sizes[enough[0]] * question.design_effect if len(enough) else None
        found[share] = None if needed is None or needed > MAX_REQUESTS else round(float(needed))
    return found


def _sizes() -> FloatArray:
    num_looks = int(np.ceil(np.log(MAX_REQUESTS / _FIRST) / np.log(_GROWTH)))
    sizes: FloatArray = np.floor(_FIRST * _GROWTH ** np.arange(num_looks))
    return sizes


def _shares(question: SizeQuestion, sizes: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return the share of experiments that are decided by each size: shape [sizes]."""
    alpha = question.alpha / question.num_comparisons
    prior = prior_requests(alpha, num_arms=2)
    is_open = np.ones(_NUM_SIMULATED, dtype=bool)
    counts = np.zeros((4, _NUM_SIMULATED))  # successes and failures of control, then of arm
    decided, before = np.ones(len(sizes)), 0.0
    for look, size in enumerate(sizes):
        added = round(float(size - before))
        of_arm = rng.binomial(added, question.weight, size=_NUM_SIMULATED)
        for row, number, share in (
            (0, added - of_arm, question.control),
            (2, of_arm, question.arm),
        ):
            successes = rng.binomial(number, share)
            counts[row] += successes
            counts[row + 1] += number - successes
        before = size
        still = np.flatnonzero(is_open)
        is_open[still] = ~are_different(counts[:, still], prior, alpha)
        decided[look] = 1.0 - is_open.mean()
        if not is_open.any():
            break
    return decided


def _means(question: SizeQuestion, sizes: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return the same for means, which are nearly normal."""
    alpha = question.alpha / question.num_comparisons
    is_open = np.ones(_NUM_SIMULATED, dtype=bool)
    sums = np.zeros((2, _NUM_SIMULATED))
    decided, before = np.ones(len(sizes)), 0.0
    shares = (1.0 - question.weight, question.weight)
    means = (question.control, question.arm)
    for look, size in enumerate(sizes):
        added = float(size - before)
        for row, (share, mean) in enumerate(zip(shares, means, strict=True)):
            spread = question.variation * mean * np.sqrt(added * share)
            sums[row] += added * share * mean + spread * rng.standard_normal(_NUM_SIMULATED)
        before = size
        numbers = [float(size) * share for share in shares]
        errors = [
            (question.variation * mean) ** 2 / number
            for mean, number in zip(means, numbers, strict=True)
        ]
        difference = sums[1] / numbers[1] - sums[0] / numbers[0]
        reach = reach_of_difference(sum(errors), sum(numbers), alpha)
        is_open &= (np.abs(difference) <= reach) | (min(numbers) < MIN_REQUESTS)
        decided[look] = 1.0 - is_open.mean()
        if not is_open.any():
            break
    return decided
