"""What a gateway enters into the audit log by itself: the settings that it starts with."""

import logging
import socket
import time

from sqlalchemy import select

from outrider.gateway.audit.chain import AuditRow, Change, record
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.settings.concealing import shown_settings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.database import DatabaseError
from outrider.gateway.storage.tables import audit_log

logger = logging.getLogger(__name__)

_ACTION = "gateway.settings"


def record_settings(audit: AuditLog, settings: Settings) -> None:
    """Record the settings where they are others than at the last start. Blocks.

    That may have been of another machine: a cluster names each new one differently, and its
    gateways are started alike.
    """
    if audit.database is None:
        return
    is_it = audit_log.c.action == _ACTION
    query = select(audit_log).where(is_it).order_by(audit_log.c.sequence.desc()).limit(1)
    try:
        with audit.database.write() as connection:
            last = connection.execute(query).mappings().first()
            before = None if last is None else AuditRow(**last).after
            target, after = f"gateway/{socket.gethostname()}", shown_settings(settings)
            change = Change(action=_ACTION, target=target, before=before, after=after)
            record(connection, change, time.time())
    except DatabaseError as error:
        logger.error("settings are missing in the audit log error=%s", error.detail)
