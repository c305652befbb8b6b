"""The endpoint /admin/audit: the log of administrative changes."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from starlette.requests import Request

from outrider.gateway.audit.chain import AuditRow
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.tenancy.keys.admin_handlers import (
    AdminCall,
    AdminHandlers,
    AdminQuery,
    admin,
)
from outrider.gateway.tenancy.keys.authenticator import Authenticator

MAX_PAGE: Final = 1000
_AFTER: Final = AdminQuery(
    name="after", description="Only changes behind this number.", most=2**53, default=0, least=0
)
_LIMIT: Final = AdminQuery(
    name="limit", description="How many at most.", most=MAX_PAGE, default=100
)


class AuditReport(CompleteModel, kw_only=True):
    """A change."""

    object: Literal["audit.change"] = "audit.change"
    sequence: Annotated[int, says("Counts from 1 without a gap.")]
    time: Annotated[str, says("UTC.")]
    actor: Annotated[str, says("key/ID, user/NAME@HOST for a command, or gateway.")]
    action: str
    target: str
    request_id: str
    before: Annotated[dict[str, Any] | None, says("The fields that change, as they were.")]
    after: dict[str, Any] | None
    erased: Annotated[bool, says("True where before and after were erased with their tenant.")]
    previous_hash: str
    hash: str


class AuditList(CompleteModel, kw_only=True):
    """Changes, the oldest first."""

    object: Literal["list"] = "list"
    data: list[AuditReport]
    has_more: bool


def audit_report(row: AuditRow) -> AuditReport:
    """Return a row of the log as clients see it."""
    return AuditReport(
        sequence=row.sequence,
        time=datetime.fromtimestamp(row.at, UTC).isoformat(timespec="milliseconds"),
        actor=row.actor,
        action=row.action,
        target=row.target,
        request_id=row.request_id,
        before=row.before,
        after=row.after,
        erased=row.details is None,
        previous_hash=row.previous_hash,
        hash=row.hash,
    )


class AuditApi(AdminHandlers):
    """Handler of the log; without a database it is empty."""

    def __init__(
        self,
        authenticator: Authenticator,
        read_body: Callable[[Request], Awaitable[bytes]],
        log: AuditLog,
    ) -> None:
        super().__init__(authenticator, read_body)
        self._log = log

    @admin("GET", "/admin/audit", "A page of the changes.", queries=(_AFTER, _LIMIT))
    async def list_changes(self, call: AdminCall) -> AuditList:
        """Return a page of the changes."""
        after, limit = call.number(_AFTER) or 0, call.number(_LIMIT) or 0
        rows = await asyncio.to_thread(self._log.page, after=after, limit=limit + 1)
        return AuditList(data=[*map(audit_report, rows[:limit])], has_more=len(rows) > limit)
