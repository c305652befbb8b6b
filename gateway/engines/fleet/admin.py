"""The endpoints of /admin/replicas: which engines there are, and which of them drain."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.roster import NoReplicaLeftError
from outrider.gateway.tenancy.keys.admin_routes import AdminRoute, admin_operation
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.keys import Principal

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


class ReplicaReport(BaseModel):
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


class ReplicaList(BaseModel):
    """All engines, as they were added."""

    object: Literal["list"] = "list"
    data: list[ReplicaReport]


REPLICA_MODELS: Final[tuple[type, ...]] = (ReplicaGroup, ReplicaReport, ReplicaList)
REPLICA_ROUTES: Final = (
    AdminRoute(
        method="GET",
        path="/admin/replicas",
        handler="list_replicas",
        operation=admin_operation("listReplicas", ReplicaList, "All engines."),
    ),
    AdminRoute(
        method="POST",
        path="/admin/replicas/drain",
        handler="drain",
        operation=admin_operation(
            "drainReplicas",
            ReplicaList,
            "The group's engines, which get no new requests from this gateway.",
            body=ReplicaGroup,
            conflicts=True,
        ),
    ),
    AdminRoute(
        method="POST",
        path="/admin/replicas/readmit",
        handler="readmit",
        operation=admin_operation(
            "readmitReplicas",
            ReplicaList,
            "The group's engines, which get requests again.",
            body=ReplicaGroup,
        ),
    ),
)


class ReplicaApi:
    """Handlers of authenticated requests. Each refuses principals without the admin scope.

    They raise GatewayErrors: AuthenticationError, PermissionDeniedError, NotFoundError,
    ConflictError and BadRequestError.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        pool: EnginePool | None,
        read_body: Callable[[Request], Awaitable[bytes]],
        change_everywhere: Callable[[GroupChange], Awaitable[None]] | None = None,
    ) -> None:
        """pool: None where the gateway has one engine. `read_body`: within all bodies' limits.

        `change_everywhere` has all of the gateway's processes `apply` a change, this one first.
        """
        self._authenticator = authenticator
        self._pool = pool
        self._read_body = read_body
        self._change_everywhere = change_everywhere or self.apply

    async def list_replicas(self, _: Request, principal: Principal) -> Response:
        """Return all engines."""
        self._authenticator.require_admin(principal)
        return _answer(self._known(), None)

    async def drain(self, request: Request, principal: Principal) -> Response:
        """Send a group no new requests; it stays connected and ends its answers."""
        return await self._change(request, principal, drains=True)

    async def readmit(self, request: Request, principal: Principal) -> Response:
        """Send a group requests again."""
        return await self._change(request, principal, drains=False)

    async def apply(self, change: GroupChange) -> None:
        """Make a change in this process. Raises ConflictError."""
        pool = self._known()
        try:
            names = pool.drain(change.group) if change.drains else pool.readmit(change.group)
        except NoReplicaLeftError as error:
            raise ConflictError(str(error)) from None
        logger.info("group=%s drains=%s replicas=%d", change.group, change.drains, len(names))

    async def _change(self, request: Request, principal: Principal, *, drains: bool) -> Response:
        self._authenticator.require_admin(principal)
        body = await self._read_body(request)
        try:
            group = ReplicaGroup.model_validate_json(body).group
        except ValidationError as error:
            raise bad_request(error, body) from None
        pool = self._known()
        if all(state.group != group for state in pool.states()):
            raise NotFoundError(f"There is no group {group!r}; GET /admin/replicas names them.")
        await self._change_everywhere(GroupChange(group, drains))
        logger.info("group=%s drains=%s by=%s", group, drains, principal.key_id)
        return _answer(pool, group)

    def _known(self) -> EnginePool:
        if self._pool is None:
            raise NotFoundError("This gateway has one engine, and no replicas: see --engines.")
        return self._pool


def _answer(pool: EnginePool, group: str | None) -> Response:
    data = [
        {"object": "replica", **asdict(state)}
        for state in pool.states()
        if group is None or state.group == group
    ]
    return Response(
        msgspec.json.encode({"object": "list", "data": data}),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
