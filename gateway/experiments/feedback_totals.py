"""Feedback as it is kept, and its sums by arm."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, func, select

from outrider.gateway.experiments.totals import (
    NUM_UNIT_BUCKETS,
    FeedbackKind,
    FeedbackTotals,
    MetricTotals,
)
from outrider.gateway.storage.tables import feedback

_MAX_LABELS: Final = 100
"""Labels of one name that are listed; the rarest are left out of the list, not of the count."""

FeedbackByArm = dict[str, tuple[FeedbackTotals, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackRow:
    """The last feedback on a request under a name, for one arm that it was in."""

    request_id: str
    name: str
    experiment: str = ""
    """Empty where it was in none."""
    version: int = 0
    arm: str = ""
    """Empty where it was in none."""
    unit_bucket: int = 0
    key_id: str = ""
    kind: FeedbackKind = "score"
    value: float = 0.0
    """The score; 0 or 1 for a success; 1 for labels."""
    label: str = ""
    given_at: float = 0.0

    def columns(self) -> dict[str, Any]:
        """Return the columns of the table."""
        return asdict(self)


class _Sums:
    """Feedback of one arm, name and kind."""

    def __init__(self) -> None:
        self.numbers = np.zeros((3, NUM_UNIT_BUCKETS))
        self.labels: dict[str, int] = {}

    def add(self, bucket: int, label: str, count: int, total: float, squares: float) -> None:
        self.numbers[:, bucket % NUM_UNIT_BUCKETS] += (count, total, squares)
        if label:
            self.labels[label] = self.labels.get(label, 0) + count

    def totals(self, name: str, kind: FeedbackKind) -> FeedbackTotals:
        most = sorted(self.labels.items(), key=lambda item: (-item[1], item[0]))[:_MAX_LABELS]
        counts, sums, squares = self.numbers
        values = MetricTotals(counts=counts, sums=sums, squares=squares)
        return FeedbackTotals(name=name, kind=kind, values=values, labels=dict(most))


class _ByArm:
    """Sums of all arms, while they are added up."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, FeedbackKind], _Sums] = {}

    def of(self, arm: str, name: str, kind: FeedbackKind) -> _Sums:
        return self._sums.setdefault((arm, name, kind), _Sums())

    def result(self) -> FeedbackByArm:
        found: FeedbackByArm = {}
        for (arm, name, kind), sums in sorted(self._sums.items(), key=lambda item: item[0]):
            found[arm] = (*found.get(arm, ()), sums.totals(name, kind))
        return found


def sums_in_database(connection: Connection, experiment: str, version: int) -> FeedbackByArm:
    """Return the sums by arm, of one experiment's version."""
    column = feedback.c
    groups = (column.arm, column.name, column.kind, column.unit_bucket, column.label)
    rows = connection.execute(
        select(
            *groups,
            func.count(),
            func.sum(column.value),
            func.sum(column.value * column.value),
        )
        .where(column.experiment == experiment, column.version == version)
        .group_by(*groups)
    )
    found = _ByArm()
    for arm, name, kind, bucket, label, count, total, squares in rows:
        found.of(arm, name, kind).add(bucket, label, int(count), float(total), float(squares))
    return found.result()
