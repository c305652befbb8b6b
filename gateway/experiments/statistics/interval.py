"""An estimate with an interval that holds the truth but for a share alpha of experiments."""

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and bounds, all in one unit."""

    estimate: float
    """NaN where there are no data."""
    low: float
    """Where nothing can be said yet: infinite, or the end of what is possible. So is `high`."""
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether the value is surely not the truth."""
        return self.is_above(value) or self.is_below(value)

    def is_above(self, value: float) -> bool:
        """Return whether the truth is surely greater than the value."""
        return self.low > value

    def is_below(self, value: float) -> bool:
        """Return whether the truth is surely less than the value."""
        return self.high < value

    def scaled(self, factor: float) -> "Interval":
        """Return the interval in another unit; `factor` is positive."""
        return Interval(
            estimate=self.estimate * factor, low=self.low * factor, high=self.high * factor
        )

    def document(self) -> dict[str, float | None]:
        """Return the interval as JSON, with None for values that are not finite."""
        return {
            "estimate": finite(self.estimate),
            "low": finite(self.low),
            "high": finite(self.high),
        }


UNKNOWN: Final = Interval(estimate=math.nan, low=-math.inf, high=math.inf)
"""An interval without any data."""


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def check_alpha(alpha: float) -> None:
    """Raise ValueError where alpha is no probability of error."""
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha is a probability between 0 and 1, not {alpha}")
