"""Check of the audit log's chain."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select

from outrider.gateway.audit.chain import FIRST_HASH, AuditRow, text_hash
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import audit_head, audit_log

ERASE: Final = "erase"
"""The action of an erasure; its `after` has the targets whose details went."""
TARGETS: Final = "targets"
_ROWS_AT_ONCE: Final = 1000
_MOST_FAULTS: Final = 100
_WITH_HEAD: Final = (
    select(
        audit_log,
        audit_head.c.sequence.label("head_sequence"),
        audit_head.c.hash.label("head_hash"),
    )
    .outerjoin(audit_head, audit_head.c.id == 1)
    .order_by(audit_log.c.sequence)
)
"""Rows and head in one statement: between two, others may append."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCheck:
    """What was found."""

    num_rows: int
    head_sequence: int
    """The newest row's number; 0 for an empty log."""
    head_hash: str
    """Kept elsewhere, it shows later whether rows were cut off at the end."""
    faults: tuple[str, ...]
    """At most 100."""


def verify_chain(database: Database, known_hash: str | None = None) -> ChainCheck:
    """Read the whole log; say which rows are not as they were written. Raises DatabaseError.

    `known_hash`: of a row that must be there.
    """
    walk = _Walk(known_hash)
    faults: list[str] = []
    with database.read() as connection:
        query = select(audit_head.c.sequence, audit_head.c.hash)
        head: Any = connection.execute(query).first()
        rows = connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(_WITH_HEAD).mappings()
        for row in rows:
            fields = dict(row)
            found = fields.pop("head_sequence"), fields.pop("head_hash")
            head = None if found[0] is None else found
            faults += walk.faults(AuditRow(**fields))
            del faults[_MOST_FAULTS:]
    faults += walk.last_faults(*(head or (0, FIRST_HASH)))
    return ChainCheck(
        num_rows=walk.num_rows,
        head_sequence=walk.sequence,
        head_hash=walk.hash,
        faults=tuple(faults[:_MOST_FAULTS]),
    )


class _Walk:
    """Goes along the chain; yields what is wrong."""

    def __init__(self, known_hash: str | None) -> None:
        self.sequence, self.hash, self.num_rows = 0, FIRST_HASH, 0
        self._missing_hash = known_hash
        self._bare: dict[str, int] = {}  # rows without details, by their targets: the last ones

    def faults(self, row: AuditRow) -> list[str]:
        """Take the next row."""
        found = [*self._faults_of(row)]
        self.sequence, self.hash = row.sequence, row.hash
        self.num_rows += 1
        if self._missing_hash == row.hash:
            self._missing_hash = None
        return found

    def last_faults(self, sequence: int, head_hash: str) -> Iterator[str]:
        """Say what no row was there for. The arguments are the head's."""
        if self._missing_hash is not None:
            yield f"no row has the hash {self._missing_hash}: rows were cut off, or written anew"
        for target, bare in self._bare.items():
            yield f"row {bare}: its details are gone, and no later row erases {target}"
        if sequence > self.sequence:
            yield f"rows {self.sequence + 1} to {sequence} were removed at the end"
        elif (sequence, head_hash) != (self.sequence, self.hash):
            yield f"the log should end with row {sequence} and the hash {head_hash}"

    def _faults_of(self, row: AuditRow) -> Iterator[str]:
        expected = self.sequence + 1
        if row.sequence < expected:
            yield f"row {row.sequence} was inserted: rows count from 1"
        elif row.sequence > expected:
            yield f"rows {expected} to {row.sequence - 1} were removed"
        elif row.previous_hash != self.hash:
            yield f"row {row.sequence} does not follow row {self.sequence}: one was replaced"
        if row.hash != row.computed_hash:
            yield f"row {row.sequence} was edited"
        if row.details is None:
            self._bare[row.target] = row.sequence
        elif text_hash(row.details) != row.details_hash:
            yield f"row {row.sequence}: its details were edited"
        elif row.action == ERASE:
            for target in (row.after or {}).get(TARGETS, ()):
                self._bare.pop(target, None)
