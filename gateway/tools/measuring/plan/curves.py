"""Time of a pass, by its rows and their context: measured, or by a data sheet."""

from dataclasses import dataclass
from typing import Protocol


class PassCurve(Protocol):
    """Time of a forward pass."""

    def __call__(self, num_rows: int, context: float) -> float:
        """Return the seconds of a pass: `num_rows` rows that see `context` tokens on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCurve:
    """The longer of reading the weights and computing the rows, then the keys and values.

    Williams, Waterman, Patterson: "Roofline: an insightful visual performance model", 2009.
    """

    weight_s: float
    row_s: float
    key_s: float
    launch_s: float

    def __call__(self, num_rows: int, context: float) -> float:
        """Return the seconds of a pass."""
        if num_rows <= 0:
            return 0.0
        return (
            self.launch_s
            + max(self.weight_s, num_rows * self.row_s)
            + (num_rows * context * self.key_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """Points that were measured here, straight lines between them, the last slope beyond."""

    num_rows: tuple[int, ...]
    """Ascending."""
    seconds: tuple[float, ...]
    """Never falling; of rows that see `context` tokens."""
    context: float = 0.0
    row_context_s: float = 0.0
    """What each row costs more for each token beyond `context`."""

    def __call__(self, num_rows: int, context: float) -> float:
        """Seconds."""
        if num_rows <= 0:
            return 0.0
        rows, seconds = self.num_rows, self.seconds
        right = next((i for i, at in enumerate(rows) if at >= num_rows), len(rows) - 1)
        right = max(right, 1)
        slope = (seconds[right] - seconds[right - 1]) / (rows[right] - rows[right - 1])
        base = seconds[right - 1] + slope * (max(num_rows, rows[0]) - rows[right - 1])
        more = (context - self.context) * self.row_context_s * num_rows
        return max(base + more, seconds[0] / 2)
