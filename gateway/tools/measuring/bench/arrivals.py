"""Arrival times and lengths of requests that neither a trace nor a prompt determines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from outrider.gateway.tools.measuring.bench.traces import WorkloadError

ArrivalKind = Literal["poisson", "gamma", "constant"]

_MOST_TOKENS: Final = 1_000_000


def arrival_times(
    count: int, *, kind: ArrivalKind, cv: float, rng: np.random.Generator
) -> Sequence[float]:
    """Times of `count` requests that come once a second on average, the first at 0.

    `cv`: coefficient of variation of gamma's gaps: 1 is poisson, more is burstier. Times at another
    rate are these divided by it, so that rates are compared on the same pattern.
    """
    if kind == "constant":
        gaps = np.ones(count)
    elif kind == "poisson":
        gaps = rng.exponential(1.0, size=count)
    else:
        shape = 1.0 / (cv * cv)
        gaps = rng.gamma(shape, 1.0 / shape, size=count)
    times = np.cumsum(gaps)
    return [float(time) for time in times - times[:1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A distribution of token counts: one value, uniform, or log-normal of a mean and variation."""

    low: int
    high: int
    cv: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LengthDistribution":
        """`128`, `64-256` (uniform) or `128~0.5` (mean ~ coefficient of variation).

        Raises WorkloadError.
        """
        try:
            if "~" in text:
                mean, _, variation = text.partition("~")
                lengths = cls(low=int(mean), high=int(mean), cv=float(variation))
            else:
                low, _, high = text.partition("-")
                lengths = cls(low=int(low), high=int(high or low))
        except ValueError:
            raise WorkloadError(
                f"{text!r} is not a length; write 128, 64-256, or 128~0.5 for a mean of 128 with a "
                "coefficient of variation of 0.5"
            ) from None
        if not 1 <= lengths.low <= lengths.high <= _MOST_TOKENS or not 0.0 <= lengths.cv <= 10.0:
            raise WorkloadError(f"{text!r} is not a length from 1 to {_MOST_TOKENS} tokens")
        return lengths

    def draw(self, count: int, rng: np.random.Generator) -> Sequence[int]:
        """So many lengths, each at least 1."""
        if self.cv == 0.0:
            return [int(n) for n in rng.integers(self.low, self.high + 1, size=count)]
        variance = math.log1p(self.cv * self.cv)
        drawn = rng.lognormal(math.log(self.low) - variance / 2, math.sqrt(variance), size=count)
        return [min(_MOST_TOKENS, max(1, round(float(n)))) for n in drawn]
