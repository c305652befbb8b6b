"""The endpoints of /admin/replicas: which engines there are, and which of them drain."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from outrider.gateway.audit.chain import Change
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.contract.schema.structs import CompleteModel
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.roster import NoReplicaLeftError
from outrider.gateway.tenancy.keys.admin_handlers import AdminCall, AdminHandlers, admin
from outrider.gateway.tenancy.keys.authenticator import Authenticator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group is to drain, or to be admitted again."""

    group: str
    drains: bool


class ReplicaGroup(BaseModel):
    """The engines that have the same models with the same arithmetic."""

    model_config = ConfigDict(extra="forbid")

    group: str = Field(min_length=1, max_length=64)
    """As GET /admin/replicas names it."""


class ReplicaReport(CompleteModel, kw_only=True):
    """An engine behind this gateway. `reason`: why it takes no new requests; empty where it does.

    `group` is empty before it was reached.
    """

    object: Literal["replica"] = "replica"
    name: str
    group: str
    is_up: bool
    is_draining: bool
    num_in_flight: int
    num_requests: int
    reason: str


class ReplicaList(CompleteModel, kw_only=True):
    """All engines, as they were added."""

    object: Literal["list"] = "list"
    data: list[ReplicaReport]


class ReplicaApi(AdminHandlers):
    """Handlers of replicas."""

    def __init__(
        self,
        authenticator: Authenticator,
        pool: EnginePool | None,
        read_body: Callable[[Request], Awaitable[bytes]],
        change_everywhere: Callable[[GroupChange], Awaitable[None]] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`pool`: None where the gateway has one engine.

        `change_everywhere` has all of the gateway's processes `apply` a change, this one first.
        """
        super().__init__(authenticator, read_body)
        self._pool = pool
        self._change_everywhere = change_everywhere or self.apply
        self._audit = audit or AuditLog()

    @admin("GET", "/admin/replicas", "All engines.")
    async def list_replicas(self, _: AdminCall) -> ReplicaList:
        """Return all engines."""
        return _listed(self._known(), None)

    @admin(
        "POST",
        "/admin/replicas/drain",
        "The group's engines, which get no new requests from this gateway.",
        conflicts=True,
    )
    async def drain_replicas(self, call: AdminCall, wanted: ReplicaGroup) -> ReplicaList:
        """Send a group no new requests; it stays connected and ends its answers."""
        return await self._change(call, wanted.group, drains=True)

    @admin("POST", "/admin/replicas/readmit", "The group's engines, which get requests again.")
    async def readmit_replicas(self, call: AdminCall, wanted: ReplicaGroup) -> ReplicaList:
        """Send a group requests again."""
        return await self._change(call, wanted.group, drains=False)

    async def apply(self, change: GroupChange) -> None:
        """Make a change in this process. Raises ConflictError."""
        pool = self._known()
        try:
            names = pool.drain(change.group) if change.drains else pool.readmit(change.group)
        except NoReplicaLeftError as error:
            raise ConflictError(str(error)) from None
        logger.info("group=%s drains=%s replicas=%d", change.group, change.drains, len(names))

    async def _change(self, call: AdminCall, group: str, *, drains: bool) -> ReplicaList:
        pool = self._known()
        if all(state.group != group for state in pool.states()):
            raise NotFoundError(f"There is no group {group!r}; GET /admin/replicas names them.")
        action = "replicas.drain" if drains else "replicas.readmit"
        async with self._audit.changing(Change(action=action, target=f"replicas/{group}")):
            await self._change_everywhere(GroupChange(group, drains))
        logger.info("group=%s drains=%s by=%s", group, drains, call.by)
        return _listed(pool, group)

    def _known(self) -> EnginePool:
        if self._pool is None:
            raise NotFoundError("This gateway has one engine, and no replicas: see --engines.")
        return self._pool


def _listed(pool: EnginePool, group: str | None) -> ReplicaList:
    states = (state for state in pool.states() if group is None or state.group == group)
    return ReplicaList(data=[ReplicaReport(**asdict(state)) for state in states])
