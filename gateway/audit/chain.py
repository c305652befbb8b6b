"""Rows of the audit log, each with the hash of the one before.

A row's hash covers all of it but its details, of which it covers a hash. So the details of a tenant
that is erased can go, and the chain still holds. They contain a nonce, so that their hash does not
let them be guessed.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, insert, select, update

from outrider.gateway.audit.actor import current_actor
from outrider.gateway.storage.database import insert_new
from outrider.gateway.storage.tables import audit_head, audit_log
from outrider.gateway.telemetry.log_context import log_context

FIRST_HASH: Final = "0" * 64
"""Stands before the first row."""
_NONCE_BYTES: Final = 16
_MAX_CHARS: Final = 256

_HASHED: Final = (
    *("sequence", "at", "actor", "action", "target", "request_id"),
    *("details_hash", "previous_hash"),
)
"""What a row's hash covers."""

Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of something that administrators manage."""

    action: str
    """Such as `key.update`."""
    target: str
    """Such as `key/ID`; no names that people chose."""
    before: Details | None = None
    """The fields that change, without secrets; None where there was nothing."""
    after: Details | None = None

    @property
    def is_void(self) -> bool:
        """True if it changes nothing."""
        return self.before is not None and self.before == self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A row of the log."""

    sequence: int
    """Counts from 1 without a gap."""
    at: float
    """Seconds since 1970 (UTC)."""
    actor: str
    """`key/ID`, `user/NAME@HOST` for a command, or `gateway`."""
    action: str
    target: str
    request_id: str
    """Empty where no request led to it."""
    details: str | None
    """JSON of before, after and a nonce; None once erased."""
    details_hash: str
    previous_hash: str
    hash: str

    @property
    def before(self) -> dict[str, Any] | None:
        """What was there."""
        return self._detail("before")

    @property
    def after(self) -> dict[str, Any] | None:
        """What is there since."""
        return self._detail("after")

    def _detail(self, name: str) -> dict[str, Any] | None:
        found: dict[str, dict[str, Any] | None] = json.loads(self.details or "{}")
        return found.get(name)

    @property
    def computed_hash(self) -> str:
        """Return the hash that the row should have."""
        return row_hash(*(getattr(self, name) for name in _HASHED))


def row_hash(*fields: float | str) -> str:
    """Return SHA-256 over the JSON of a row's fields."""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def text_hash(text: str) -> str:
    """Return SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def record(connection: Connection, change: Change, now_s: float) -> None:
    """Append a change within the transaction that makes it; nothing where it changes nothing.

    The head's row is locked until the transaction ends, so several writers append in turn.
    """
    if change.is_void:
        return
    insert_new(connection, audit_head, [{"id": 1, "sequence": 0, "hash": FIRST_HASH}])
    connection.execute(update(audit_head).values(sequence=audit_head.c.sequence + 1))
    head = connection.execute(select(audit_head)).mappings().one()
    details = {
        "before": change.before,
        "after": change.after,
        "nonce": secrets.token_hex(_NONCE_BYTES),
    }
    document = json.dumps(details, sort_keys=True, default=str)
    context = log_context()
    fields = {
        "sequence": head["sequence"],
        "at": now_s,
        "actor": _word(current_actor()),
        "action": change.action,
        "target": _word(change.target),
        "request_id": "" if context is None else _word(context.request_id),
        "details_hash": text_hash(document),
        "previous_hash": head["hash"],
    }
    own_hash = row_hash(*fields.values())
    connection.execute(insert(audit_log).values(**fields, details=document, hash=own_hash))
    connection.execute(update(audit_head).values(hash=own_hash))


def differences(before: Details, after: Details) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that differ, as they were and as they are."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: before.get(name) for name in names}, {name: after.get(name) for name in names}


def _word(text: str) -> str:
    """Return a text that every database keeps as it is, and that a terminal can show."""
    return text.encode("unicode_escape").decode()[:_MAX_CHARS]
