"""An arm's totals as JSON, without its feedback."""

from typing import Final

import msgspec
import numpy as np

from outrider.gateway.experiments.sketch import QuantileSketch
from outrider.gateway.experiments.totals import (
    METRIC_NAMES,
    NUM_UNIT_BUCKETS,
    SKETCH_NAMES,
    ArmTotals,
    MetricTotals,
)
from outrider.gateway.storage.database import DatabaseError

_FORMAT: Final = 1


class _Sketch(msgspec.Struct):
    zeros: int
    bins: list[tuple[int, int]]


class _Document(msgspec.Struct):
    """`metrics`: by name, the buckets that are not empty: bucket, count, sum, sum of squares."""

    format: int
    metrics: dict[str, list[tuple[int, float, float, float]]]
    sketches: dict[str, _Sketch]
    first_at: float | None
    last_at: float | None


def encode_totals(totals: ArmTotals) -> str:
    """Encode totals as JSON, from which the same numbers are read again, to the last bit."""
    metrics = {}
    for name, metric in totals.metrics.items():
        rows = zip(
            range(NUM_UNIT_BUCKETS),
            metric.counts.tolist(),
            metric.sums.tolist(),
            metric.squares.tolist(),
            strict=True,
        )
        metrics[str(name)] = [row for row in rows if row[1]]
    document = _Document(
        format=_FORMAT,
        metrics=metrics,
        sketches={
            str(name): _Sketch(zeros=sketch.num_zeros, bins=list(sketch.bins.items()))
            for name, sketch in totals.sketches.items()
        },
        first_at=totals.first_at,
        last_at=totals.last_at,
    )
    return msgspec.json.encode(document).decode()


def decode_totals(experiment: str, version: int, arm: str, text: str) -> ArmTotals:
    """Decode totals; metrics that the text lacks are empty.

    Raises DatabaseError for a text that another program has written.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
        if document.format != _FORMAT:
            raise ValueError(f"format {document.format} is unknown")
        return ArmTotals(
            experiment=experiment,
            version=version,
            arm=arm,
            metrics={name: _metric(document.metrics.get(name, [])) for name in METRIC_NAMES},
            sketches={name: _sketch(document.sketches.get(name)) for name in SKETCH_NAMES},
            first_at=document.first_at,
            last_at=document.last_at,
        )
    except (ValueError, IndexError) as error:  # msgspec's errors are ValueErrors
        raise DatabaseError(
            f"measures of {experiment}:{version}/{arm} cannot be read ({error}); they were written "
            "by another program. Use that one, or delete the experiment"
        ) from None


def _metric(rows: list[tuple[int, float, float, float]]) -> MetricTotals:
    numbers = np.zeros((3, NUM_UNIT_BUCKETS))
    for bucket, *values in rows:
        numbers[:, bucket] = values
    return MetricTotals(counts=numbers[0], sums=numbers[1], squares=numbers[2])


def _sketch(stored: _Sketch | None) -> QuantileSketch:
    return QuantileSketch() if stored is None else QuantileSketch(dict(stored.bins), stored.zeros)
