"""Arms made of drawn values, for the statistics' tests."""

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.experiments.sketch import QuantileSketch
from outrider.gateway.experiments.totals import (
    METRIC_NAMES,
    NUM_UNIT_BUCKETS,
    ArmTotals,
    FeedbackTotals,
    MetricName,
    MetricTotals,
    SketchName,
)

Floats = NDArray[np.float64]


def metric(values: Floats, buckets: NDArray[np.int64]) -> MetricTotals:
    """Totals of values by their units' buckets."""
    return MetricTotals(
        counts=np.bincount(buckets, minlength=NUM_UNIT_BUCKETS).astype(float),
        sums=np.bincount(buckets, values, NUM_UNIT_BUCKETS).astype(float),
        squares=np.bincount(buckets, values * values, NUM_UNIT_BUCKETS).astype(float),
    )


def counted(successes: int, n: int) -> MetricTotals:
    """So many ones among n, spread evenly over the buckets."""
    values = np.zeros(n)
    values[:successes] = 1.0
    return metric(values, np.arange(n) % NUM_UNIT_BUCKETS)


def sketch_of(values: Floats) -> QuantileSketch:
    """A sketch of the values."""
    sketch = QuantileSketch()
    sketch.extend(values.tolist())
    return sketch


def arm(
    name: str,
    rng: np.random.Generator,
    *,
    num_requests: int,
    median_s: float,
    limit_s: float = 0.5,
    num_users: int = 300,
    error_share: float = 0.01,
) -> ArmTotals:
    """Users of different speed, lognormal times, one objective; scores and labels as feedback."""
    user = rng.integers(num_users, size=num_requests)
    buckets = rng.integers(NUM_UNIT_BUCKETS, size=num_users)[user]
    speed = rng.normal(0.0, 0.2, num_users)[user]
    ttft = median_s * np.exp(speed + rng.normal(0.0, 0.5, num_requests))
    duration = ttft + rng.gamma(4.0, 0.5, num_requests)
    values: dict[MetricName, Floats] = {each: np.zeros(num_requests) for each in METRIC_NAMES}
    values["attained"] = (ttft < limit_s).astype(float)
    values["failed"] = (rng.random(num_requests) < error_share).astype(float)
    values["ttft_s"], values["duration_s"] = ttft, duration
    values["inter_token_s"] = duration / 50.0
    values["cost_usd"] = rng.gamma(2.0, 0.001, num_requests)
    values["completion_tokens"] = rng.poisson(40.0, num_requests).astype(float)
    times: dict[SketchName, Floats] = {
        "ttft_s": ttft, "duration_s": duration, "inter_token_s": duration / 50.0,
    }  # fmt: skip
    quarter = num_requests // 4
    stars = rng.integers(1, 6, quarter).astype(float)
    feedback = (
        FeedbackTotals(name="stars", kind="score", values=metric(stars, buckets[:quarter])),
        FeedbackTotals(
            name="why",
            kind="label",
            values=metric(np.ones(5), buckets[:5]),
            labels={"slow": 3, "good": 2},
        ),
    )
    return ArmTotals(
        experiment="budget",
        version=1,
        arm=name,
        metrics={each: metric(found, buckets) for each, found in values.items()},
        sketches={each: sketch_of(found) for each, found in times.items()},
        feedback=feedback,
    )
