"""The comparison of an arm with the control."""

from dataclasses import dataclass
from typing import Any

from outrider.gateway.experiments.statistics.interval import Interval, finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arm minus control, and arm / control - 1, each with an interval."""

    difference: Interval
    lift: Interval
    p_value: float
    """Always valid: under equality it is ever at most alpha with probability alpha."""

    def document(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {
            "difference": self.difference.document(),
            "lift": self.lift.document(),
            "p_value": finite(self.p_value),
        }
