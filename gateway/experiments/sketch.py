"""Quantiles of latencies in little memory, mergeable: DDSketch (Masson, Rim and Lee 2019)."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

RELATIVE_ACCURACY: Final = 0.01
"""Quantiles are exact to within this share of their value."""
MAX_BINS: Final = 2048
"""Bins at most: with the accuracy above they span 17 powers of ten before any is given up."""
_GAMMA: Final = (1.0 + RELATIVE_ACCURACY) / (1.0 - RELATIVE_ACCURACY)
_PER_LOG: Final = 1.0 / math.log(_GAMMA)
_LEAST: Final = 1e-9
"""Values up to this count as zero."""


class QuantileSketch:
    """Counts of values in bins whose edges grow by a constant factor.

    Bin i holds values in (gamma^(i-1), gamma^i]; all sketches have the same gamma, so merging adds
    counts and loses nothing. Above MAX_BINS the lowest bins become one, as the paper does: high
    quantiles stay exact to RELATIVE_ACCURACY.
    """

    __slots__ = ("_bins", "_num_zeros")

    def __init__(self, bins: Mapping[int, int] | None = None, num_zeros: int = 0) -> None:
        """`bins`: counts by index, as `bins` returns them. Raises ValueError for negative
        counts."""
        self._bins: dict[int, int] = dict(bins or {})
        self._num_zeros = num_zeros
        if num_zeros < 0 or any(count < 1 for count in self._bins.values()):
            raise ValueError("a sketch's counts are at least 1, its number of zeros at least 0")
        self._collapse()

    def add(self, value: float) -> None:
        """Count one value, >= 0. Raises ValueError for anything else, NaN and infinity too."""
        if value > _LEAST:
            if value == math.inf:
                raise ValueError("infinity has no bin")
            index = math.ceil(math.log(value) * _PER_LOG)
            bins = self._bins
            if index in bins:
                bins[index] += 1
            else:
                bins[index] = 1
                if len(bins) > MAX_BINS:
                    self._collapse()
        elif value >= 0.0:
            self._num_zeros += 1
        else:
            raise ValueError(f"{value} cannot be counted: values are not negative and not NaN")

    def extend(self, values: Iterable[float]) -> None:
        """Count all values."""
        for value in values:
            self.add(value)

    @property
    def count(self) -> int:
        """Return the number of values."""
        return self._num_zeros + sum(self._bins.values())

    @property
    def num_zeros(self) -> int:
        """Return the number of zeros."""
        return self._num_zeros

    @property
    def bins(self) -> dict[int, int]:
        """Return the counts by index, in the indices' order."""
        return dict(sorted(self._bins.items()))

    def quantile(self, q: float) -> float:
        """Return the value with a share `q` in [0, 1] at or below it, within RELATIVE_ACCURACY.

        It is the value of rank ceil(q n), at least 1. NaN where there are no values. Raises
        ValueError for another q.
        """
        return self.at_rank(self._rank(q))

    def at_rank(self, rank: int) -> float:
        """Return the `rank`-th smallest value (from 1), within RELATIVE_ACCURACY.

        Ranks outside give the smallest and the largest. NaN where there are no values.
        """
        lower, upper = self.edges_at_rank(rank)
        return (lower + upper) / 2.0 if upper == 0.0 else 2.0 * lower * upper / (lower + upper)

    def edges_at_rank(self, rank: int) -> tuple[float, float]:
        """Return the edges of the `rank`-th smallest value's bin: surely lower < it <= upper.

        (0, 0) for zeros; NaN where there are no values.
        """
        if not self._bins and not self._num_zeros:
            return math.nan, math.nan
        seen = self._num_zeros
        if rank <= seen or not self._bins:
            return 0.0, 0.0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= rank:
                break
        return _GAMMA ** (index - 1), _GAMMA**index

    def cdf(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Return lower edges, upper edges and cumulative counts of non-empty bins, ascending.

        Shapes (b,). A value counted in bin k is in (lower[k], upper[k]], zeros are (0, 0]; so
        `cumulative[k]` values are surely <= upper[k], and all others are surely greater.
        """
        items = sorted(self._bins.items())
        zeros = 1 if self._num_zeros else 0
        indices = np.array([index for index, _ in items], dtype=np.float64)
        lower = np.concatenate([np.zeros(zeros), _GAMMA ** (indices - 1)])
        upper = np.concatenate([np.zeros(zeros), _GAMMA**indices])
        counts = np.array([self._num_zeros] * zeros + [c for _, c in items], dtype=np.int64)
        return lower, upper, np.cumsum(counts)

    def merged(self, other: "QuantileSketch") -> "QuantileSketch":
        """Return a new sketch with the values of both."""
        bins = dict(self._bins)
        for index, count in other._bins.items():
            bins[index] = bins.get(index, 0) + count
        return QuantileSketch(bins, self._num_zeros + other._num_zeros)

    def _rank(self, q: float) -> int:
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile needs a share from 0 to 1, not {q}")
        return max(1, math.ceil(q * self.count))

    def _collapse(self) -> None:
        """Merge the lowest bins until there are no more than MAX_BINS."""
        excess = len(self._bins) - MAX_BINS
        if excess <= 0:
            return
        lowest = sorted(self._bins)[: excess + 1]
        self._bins[lowest[-1]] = sum(self._bins.pop(index) for index in lowest)
