"""The stores that keep data of tenants, as the settings have them, for `outrider erase`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Table, case, select, update

from outrider.gateway.audit.erasing import ERASED, Subject
from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.telemetry.capture import captured_files
from outrider.gateway.telemetry.capture_erasing import erase_lines
from outrider.gateway.telemetry.dated_files import DatedFiles
from outrider.gateway.tenancy.keys.key_parts import key_hasher
from outrider.gateway.tenancy.ledger.row import printable

_ROWS_AT_ONCE = 2000
_TIMEOUT_S = 10.0


def _erase_ledger(settings: Settings, database: Database, subject: Subject) -> int:
    """Take the identity out of the rows; what was used and paid stays."""
    ledger = tables.ledger
    is_own: ColumnElement[bool] = ledger.c.key_id.in_(subject.key_ids)
    is_own |= ledger.c.team_id == subject.tenant
    values: dict[str, Any] = {"end_user": "", "client_request_id": "", "key_id": ERASED}
    if subject.end_user is None:
        values["team_id"] = None
    else:
        is_person = ledger.c.key_id.in_(subject.person_ids)
        values["key_id"] = case((is_person, ERASED), else_=ledger.c.key_id)
        is_theirs = is_person | ledger.c.end_user.in_(_forms(settings, database, subject))
        is_own = is_theirs if subject.tenant is None else is_theirs & is_own
    return _erase_rows(database, ledger, is_own, ledger.c.row_id, values)


def _erase_feedback(_: Settings, database: Database, subject: Subject) -> int:
    feedback = tables.feedback
    is_own = feedback.c.key_id.in_(subject.own_ids)
    values = {"key_id": ERASED, "label": ""}
    return _erase_rows(database, feedback, is_own, feedback.c.request_id, values)


def _erase_audit(_: Settings, database: Database, subject: Subject) -> int:
    """Remove details of changes; the row of the erasure says that they were there."""
    log = tables.audit_log
    is_own = log.c.target.in_(subject.targets) & log.c.details.is_not(None)
    return _erase_rows(database, log, is_own, log.c.sequence, {"details": None})


def _erase_rows(
    database: Database, table: Table, is_own: Any, row_id: Any, values: dict[str, Any]
) -> int:
    """Change rows a few at a time: others write in between."""
    found = select(row_id).where(is_own).limit(_ROWS_AT_ONCE).scalar_subquery()
    statement, num_rows = update(table).where(is_own & row_id.in_(found)).values(values), 0
    while True:
        with database.write() as connection:
            count = connection.execute(statement).rowcount
        if not count:
            return num_rows
        num_rows += count


def _erase_batches(settings: Settings, database: Database, subject: Subject) -> int:
    from outrider.gateway.wiring.batches import batch_store

    if subject.tenant is None or subject.end_user is not None:
        return 0  # files do not say whose requests are in them
    return batch_store(settings, database).erase(subject.tenant)


def _erase_captured(settings: Settings, database: Database, subject: Subject) -> int:
    folder = settings.telemetry.capture.folder
    paths = captured_files(folder).all() if folder else []
    return _erase_lines(settings, database, subject, paths)


def _erase_mirrored(settings: Settings, database: Database, subject: Subject) -> int:
    file = settings.mirror.file and settings.mirror.file.expanduser()
    paths = DatedFiles(file).all() if file else []
    if file and file.is_file():  # an older version's, or one that was joined of these
        paths.append(file)
    return _erase_lines(settings, database, subject, paths)


def _erase_lines(
    settings: Settings, database: Database, subject: Subject, paths: Sequence[Path]
) -> int:
    key_ids = None if subject.tenant is None else subject.key_ids
    forms = _forms(settings, database, subject)
    return erase_lines(paths, subject.own_ids, forms, key_ids)


def _forms(settings: Settings, database: Database, subject: Subject) -> list[str]:
    """Return how an end user may have been kept: settings may have been changed."""
    if subject.end_user is None:
        return []
    digest = key_hasher(settings, database).end_user_digest(subject.end_user)
    return [subject.end_user, printable(subject.end_user), digest]


def _erase_redis(settings: Settings, _: Database, subject: Subject) -> int:
    """Remove stored responses, and all cached answers: those do not say whose they are."""
    if settings.redis_url is None:
        return 0
    from outrider.gateway.answering.caching.redis_store import erase_answers
    from outrider.gateway.http.apis.responses.redis_responses import erase_responses
    from outrider.gateway.tenancy.limits.redis_store import RedisStore, redis_client

    async def erase() -> int:
        client = redis_client(str(settings.redis_url), _TIMEOUT_S)
        store = RedisStore(client, timeout_s=_TIMEOUT_S, name="responses")
        try:
            found = await erase_responses(client, store, subject.tenant, subject.end_user)
            return found + await erase_answers(client)
        finally:
            await client.aclose()

    return asyncio.run(erase())


def _erase_extents(settings: Settings, _: Database, subject: Subject) -> int:
    from outrider.engine.cache.block_pool import owner_tag
    from outrider.engine.cache.extent_erasing import erase_named_prompts, erase_owners
    from outrider.gateway.wiring.kv_folder import open_folder, open_seal

    place = settings.engine.kv_folder
    folder = open_folder(settings) if place and place.expanduser().is_dir() else None
    if folder is None:
        return 0
    owners = {owner_tag(salt) for salt in subject.cache_salts}
    num_removed = erase_owners(folder, open_seal(settings), owners) if owners else 0
    if subject.tenant is not None and subject.end_user is None:
        num_removed += erase_named_prompts(folder, subject.tenant)
    return num_removed


STORES: Final[Mapping[str, Callable[[Settings, Database, Subject], int]]] = {
    "ledger rows": _erase_ledger,
    "feedback": _erase_feedback,
    "audit details": _erase_audit,
    "files and batches": _erase_batches,
    "captured texts": _erase_captured,
    "copies of mirrors": _erase_mirrored,
    "answers in Redis": _erase_redis,
    "keys and values": _erase_extents,
}
"""What outlives a gateway, each with what removes a subject's, or takes its identity away.

They return how much; called again they find nothing. They block.
"""
