"""Counts of an experiment's arm: the data of the statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.experiments.sketch import QuantileSketch

_Floats = NDArray[np.float64]

NUM_UNIT_BUCKETS: Final = 64
"""Number of buckets that units are hashed into; all requests of a unit are in one bucket."""

ShareName = Literal["attained", "failed", "refused", "cancelled", "escalated", "degraded"]
ValueName = Literal["ttft_s", "inter_token_s", "duration_s", "cost_usd", "completion_tokens"]
MetricName = ShareName | ValueName
SketchName = Literal["ttft_s", "inter_token_s", "duration_s"]
FeedbackKind = Literal["score", "success", "label"]

SHARE_NAMES: Final[tuple[ShareName, ...]] = get_args(ShareName)
"""Each request counts 0 or 1. `attained` leaves out requests that the client gave up."""
VALUE_NAMES: Final[tuple[ValueName, ...]] = get_args(ValueName)
"""`cost_usd` has every request; latencies those that got so far, `duration_s` and
`completion_tokens` those that were answered."""
METRIC_NAMES: Final[tuple[MetricName, ...]] = (*SHARE_NAMES, *VALUE_NAMES)
SKETCH_NAMES: Final[tuple[SketchName, ...]] = get_args(SketchName)


def _zeros() -> _Floats:
    return np.zeros(NUM_UNIT_BUCKETS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricTotals:
    """A metric's count, sum and sum of squares by the units' bucket: shape (64,) each.

    Buckets are clusters: their totals are independent where requests of one unit are not.
    """

    counts: _Floats = field(default_factory=_zeros)
    sums: _Floats = field(default_factory=_zeros)
    squares: _Floats = field(default_factory=_zeros)

    @property
    def n(self) -> int:
        """Return the number of requests counted."""
        return round(float(self.counts.sum()))

    @property
    def sum(self) -> float:
        """Return the sum of all values."""
        return float(self.sums.sum())

    @property
    def sum_squares(self) -> float:
        """Return the sum of all values' squares."""
        return float(self.squares.sum())

    @property
    def mean(self) -> float:
        """Return the mean; NaN where no request was counted."""
        return self.sum / self.n if self.n else float("nan")

    @property
    def variance(self) -> float:
        """Return the variance of a single request (not of the mean), with n - 1; NaN below two."""
        n = self.n
        if n < 2:
            return float("nan")
        return max(0.0, (self.sum_squares - self.sum * self.sum / n) / (n - 1))

    def __add__(self, other: "MetricTotals") -> "MetricTotals":
        return MetricTotals(
            counts=self.counts + other.counts,
            sums=self.sums + other.sums,
            squares=self.squares + other.squares,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedbackTotals:
    """Outcomes of one name that were posted back."""

    name: str
    kind: FeedbackKind
    values: MetricTotals
    """Scores as they are, successes as 0 or 1, labels as 1 each."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Counts them."""


def _no_metrics() -> dict[MetricName, MetricTotals]:
    return {name: MetricTotals() for name in METRIC_NAMES}


def _no_sketches() -> dict[SketchName, QuantileSketch]:
    return {name: QuantileSketch() for name in SKETCH_NAMES}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArmTotals:
    """One arm of an experiment's version, all gateways together."""

    experiment: str
    version: int
    arm: str
    metrics: Mapping[MetricName, MetricTotals] = field(default_factory=_no_metrics)
    """Every name."""
    sketches: Mapping[SketchName, QuantileSketch] = field(default_factory=_no_sketches)
    """Every name."""
    feedback: tuple[FeedbackTotals, ...] = ()
    first_at: float | None = None
    """When the first of its requests ended, in seconds since 1970; None where there were none."""
    last_at: float | None = None
    """When the last of them ended."""

    @property
    def num_requests(self) -> int:
        """Return the number of all requests of the arm, whatever their outcome."""
        return self.metrics["cancelled"].n

    @property
    def requests_by_bucket(self) -> _Floats:
        """Return requests by the units' bucket: shape (64,)."""
        return self.metrics["cancelled"].counts

    def count(self, name: ShareName) -> int:
        """Return the number of requests that attained, failed, were refused, ..."""
        return round(self.metrics[name].sum)

    def __add__(self, other: "ArmTotals") -> "ArmTotals":
        """Return the sum of both. Raises ValueError for another arm's."""
        if (self.experiment, self.version, self.arm) != (
            other.experiment, other.version, other.arm,
        ):  # fmt: skip
            raise ValueError(
                f"{other.experiment}:{other.version}/{other.arm} cannot be added to "
                f"{self.experiment}:{self.version}/{self.arm}"
            )
        return ArmTotals(
            experiment=self.experiment,
            version=self.version,
            arm=self.arm,
            metrics={n: self.metrics[n] + other.metrics[n] for n in METRIC_NAMES},
            sketches={n: self.sketches[n].merged(other.sketches[n]) for n in SKETCH_NAMES},
            feedback=_joined(self.feedback, other.feedback),
            first_at=min(
                (t for t in (self.first_at, other.first_at) if t is not None), default=None
            ),
            last_at=max((t for t in (self.last_at, other.last_at) if t is not None), default=None),
        )


def _joined(
    one: tuple[FeedbackTotals, ...], two: tuple[FeedbackTotals, ...]
) -> tuple[FeedbackTotals, ...]:
    found = {(item.name, item.kind): item for item in one}
    for item in two:
        key = (item.name, item.kind)
        found[key] = _both(found[key], item) if key in found else item
    return tuple(found[key] for key in sorted(found))


def _both(one: FeedbackTotals, two: FeedbackTotals) -> FeedbackTotals:
    labels = dict(one.labels)
    for label, count in two.labels.items():
        labels[label] = labels.get(label, 0) + count
    return FeedbackTotals(
        name=one.name, kind=one.kind, values=one.values + two.values, labels=labels
    )
