"""Stores of arms' totals and feedback: each gateway adds to rows of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Select, delete, distinct, func, insert, select, text, update

from outrider.gateway.experiments.feedback_totals import (
    FeedbackByArm,
    FeedbackRow,
    sums_in_database,
)
from outrider.gateway.experiments.measure_document import decode_totals, encode_totals
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.storage.database import Database, insert_into
from outrider.gateway.storage.tables import experiment_measures as measures
from outrider.gateway.storage.tables import feedback

ArmKey = tuple[str, int, str]
"""Experiment, version, arm."""

FOLDED_WRITER: Final = "folded"
"""The writer of the rows that hold the counts of ended gateways."""
PASSED_MARK: Final = "~"
"""Begins the name of rows that count requests outside an experiment, by reason; no arm's does."""
MAX_NAMES: Final = 16
"""Names under which feedback on one request may be given."""

_OLD_FEEDBACK: Final = text(
    "DELETE FROM feedback WHERE rowid <= (SELECT max(rowid) FROM feedback) - :kept"
)


class TooManyNamesError(ValueError):
    """A request has feedback under MAX_NAMES names already."""


class MeasureStore:
    """Keeps totals and feedback. All blocks, and may raise DatabaseError.

    Several gateways may use one database at once.
    """

    def __init__(self, database: Database, *, max_feedback: int = 100_000) -> None:
        """`max_feedback`: rows that are kept where they are in memory; the oldest are dropped."""
        self._database = database
        self._max_feedback = max_feedback

    def add(
        self, writer_id: str, sequence: int, batch: Mapping[ArmKey, ArmTotals], now_s: float
    ) -> None:
        """Add a writer's batch, in one transaction; nothing if its `sequence` is not new."""
        with self._database.write() as connection:
            for key in sorted(batch):
                _add_row(connection, writer_id, sequence, batch[key], now_s)

    def totals(self, experiment: str, version: int) -> dict[str, ArmTotals]:
        """Return totals by arm, of all writers, with feedback."""
        with self._database.read() as connection:
            rows = connection.execute(_rows_of(experiment, version)).all()
            given = sums_in_database(connection, experiment, version)
        return _with_feedback(_sum_by_arm(_decoded(row) for row in rows), given)

    def passed_over(self, experiment: str, version: int) -> dict[str, int]:
        """Return the number of requests that took no part, by reason, of all writers."""
        with self._database.read() as connection:
            rows = connection.execute(_rows_of(experiment, version)).all()
        return _passed_over(_sum_by_key(_decoded(row) for row in rows))

    def put_feedback(self, rows: Sequence[FeedbackRow]) -> None:
        """Store rows of one request and name, replacing earlier ones. Raises TooManyNamesError."""
        if not rows:
            return
        request_id, name = rows[0].request_id, rows[0].name
        column = feedback.c
        with self._database.write() as connection:
            others = select(func.count(distinct(column.name))).where(
                column.request_id == request_id, column.name != name
            )
            if connection.execute(others).scalar_one() >= MAX_NAMES:
                raise TooManyNamesError(request_id)
            statement = insert_into(feedback, connection.dialect.name)
            changed = {
                n: statement.excluded[n] for n in ("kind", "value", "label", "given_at", "key_id")
            }
            statement = statement.on_conflict_do_update(
                index_elements=["request_id", "name", "experiment"], set_=changed
            )
            connection.execute(statement, [row.columns() for row in rows])
            if self._database.is_in_memory:
                connection.execute(_OLD_FEEDBACK, {"kept": self._max_feedback})

    def fold(self, before_s: float) -> int:
        """Merge rows without additions since then; return their number."""
        with self._database.write() as connection:
            rows = connection.execute(
                select(measures)
                .where(measures.c.updated_at < before_s, measures.c.writer != FOLDED_WRITER)
                .with_for_update()
            ).all()
            for row in rows:
                connection.execute(delete(measures).where(*_is_row(row)))
            newest = max((row.updated_at for row in rows), default=0.0)
            for totals in _sum_by_key(_decoded(row) for row in rows).values():
                _add_row(connection, FOLDED_WRITER, None, totals, newest)
            return len(rows)

    def delete(self, experiment: str) -> None:
        """Forget all versions, feedback too."""
        with self._database.write() as connection:
            connection.execute(delete(measures).where(measures.c.experiment == experiment))
            connection.execute(delete(feedback).where(feedback.c.experiment == experiment))


def _rows_of(experiment: str, version: int) -> Select[Any]:
    return select(measures).where(
        measures.c.experiment == experiment, measures.c.version == version
    )


def _is_row(row: Any) -> tuple[Any, ...]:
    column = measures.c
    return (
        column.experiment == row.experiment,
        column.version == row.version,
        column.arm == row.arm,
        column.writer == row.writer,
    )


def _add_row(
    connection: Connection,
    writer_id: str,
    sequence: int | None,
    totals: ArmTotals,
    now_s: float,
) -> None:
    """Add to the writer's row of the arm. `sequence` None: regardless of earlier additions."""
    column = measures.c
    where = (
        column.experiment == totals.experiment,
        column.version == totals.version,
        column.arm == totals.arm,
        column.writer == writer_id,
    )
    row = connection.execute(select(measures).where(*where).with_for_update()).first()
    if row is None:
        values = {
            "experiment": totals.experiment,
            "version": totals.version,
            "arm": totals.arm,
            "writer": writer_id,
            "sequence": sequence or 0,
            "updated_at": now_s,
            "document": encode_totals(totals),
        }
        connection.execute(insert(measures).values(values))
        return
    if sequence is not None and row.sequence >= sequence:
        return
    document = encode_totals(_decoded(row) + totals)
    connection.execute(
        update(measures)
        .where(*where)
        .values(sequence=sequence or 0, updated_at=now_s, document=document)
    )


def _decoded(row: Any) -> ArmTotals:
    return decode_totals(row.experiment, row.version, row.arm, row.document)


def _sum_by_key(parts: Iterable[ArmTotals]) -> dict[ArmKey, ArmTotals]:
    found: dict[ArmKey, ArmTotals] = {}
    for part in parts:
        key = (part.experiment, part.version, part.arm)
        found[key] = found[key] + part if key in found else part
    return found


def _sum_by_arm(parts: Iterable[ArmTotals]) -> dict[str, ArmTotals]:
    found = _sum_by_key(parts)
    return {key[2]: one for key, one in found.items() if not key[2].startswith(PASSED_MARK)}


def _passed_over(found: Mapping[ArmKey, ArmTotals]) -> dict[str, int]:
    return {
        key[2].removeprefix(PASSED_MARK): totals.num_requests
        for key, totals in found.items()
        if key[2].startswith(PASSED_MARK)
    }


def _with_feedback(arms: dict[str, ArmTotals], given: FeedbackByArm) -> dict[str, ArmTotals]:
    return {arm: replace(arms[arm], feedback=given.get(arm, ())) for arm in sorted(arms)}
