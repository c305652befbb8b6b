"""Bootstrap intervals of a measured ratio over the units that were drawn.

A unit is what would be drawn anew if the benchmark were run again: a prompt with all its rounds, or
a pair of runs next to each other in time. Resampling units and computing the figure from all of
their samples (Efron, Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8 and 13:
clusters, percentile intervals) keeps what belongs together in time together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Figure = Callable[[NDArray[np.int64]], float]
"""From indices of units, with repetitions, to the figure that they give together."""

_CONFIDENCE = 0.95
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the bounds between which it lies with 95 % confidence."""

    estimate: float
    low: float
    high: float
    num_units: int

    def __str__(self) -> str:
        """Such as `1.32 (1.28-1.37)`."""
        return f"{self.estimate:.2f} ({self.low:.2f}-{self.high:.2f})"


def bootstrap(figure: Figure, num_units: int, *, seed: int = 0) -> Interval:
    """The figure of all units with its percentile interval. Raises ValueError for no units."""
    if num_units < 1:
        raise ValueError("no units, so no interval")
    everything = np.arange(num_units)
    generator = np.random.default_rng(seed)
    drawn = [figure(generator.integers(num_units, size=num_units)) for _ in range(_NUM_RESAMPLES)]
    tail = 50.0 * (1.0 - _CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100.0 - tail])
    return Interval(
        estimate=figure(everything), low=float(low), high=float(high), num_units=num_units
    )


def ratio_of_rates(
    amounts: tuple[Sequence[float], Sequence[float]],
    seconds: tuple[Sequence[float], Sequence[float]],
) -> Interval:
    """Rate of the first side over that of the second; a unit has an amount and a time of each.

    A rate is the sum of the amounts over the sum of the seconds. Raises ValueError where the sides
    have unequal numbers of units.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (*amounts, *seconds)]
    num_units = len(columns[0])
    if any(len(column) != num_units for column in columns):
        raise ValueError(f"units of unequal number: {[len(column) for column in columns]}")

    def ratio(units: NDArray[np.int64]) -> float:
        amount, other_amount, spent_s, other_spent_s = (column[units].sum() for column in columns)
        return float((amount / spent_s) / (other_amount / other_spent_s))

    return bootstrap(ratio, num_units)


def ratio_of_percentiles(
    above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], percent: float
) -> Interval:
    """A percentile of all samples of one side over that of the other; a list of samples a unit.

    Raises ValueError where the sides have unequal numbers of units, or no samples.
    """
    if len(above) != len(below):
        raise ValueError(f"{len(above)} units over {len(below)}")
    if not any(map(len, above)) or not any(map(len, below)):
        raise ValueError("no samples, so no percentile")
    sides = [[np.asarray(unit, dtype=np.float64) for unit in side] for side in (above, below)]

    def ratio(units: NDArray[np.int64]) -> float:
        one, other = (np.concatenate([side[unit] for unit in units]) for side in sides)
        if not one.size or not other.size:  # only units without a sample were drawn
            return 1.0
        return float(np.percentile(one, percent) / np.percentile(other, percent))

    return bootstrap(ratio, len(above))
