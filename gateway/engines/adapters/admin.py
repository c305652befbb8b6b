"""The endpoints of /admin/adapters."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.engines.adapters.registry import AdapterChange, AdapterRegistry, NamedEntry
from outrider.gateway.settings.adapters import ADAPTER_NAME, AdapterTier, NamedAdapter
from outrider.gateway.tenancy.keys.admin_routes import AdminRoute, admin_operation
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.keys import Principal

logger = logging.getLogger(__name__)


class AdapterLoad(BaseModel):
    """An adapter to load, or to load anew."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{ADAPTER_NAME.pattern}$")
    """The name that requests use as model."""
    path: str = Field(min_length=1, max_length=4096)
    """Its folder on the gateway's machine, with adapter_config.json and
    adapter_model.safetensors."""
    tier: AdapterTier = "large"
    """The tier whose model it changes; auto: the large one's, routed between it and the small
    model."""


class AdapterReport(BaseModel):
    """A loaded adapter. `digest`: of its content; `watched`: it came from the watched folder.

    Facts of files that cannot be read any more are null.
    """

    object: Literal["adapter"] = "adapter"
    name: str
    path: str
    tier: AdapterTier
    digest: str | None
    max_rank: int | None
    num_modules: int | None
    num_bytes: int | None
    watched: bool


class AdapterList(BaseModel):
    """All adapters that have a name, by name."""

    object: Literal["list"] = "list"
    data: list[AdapterReport]


class AdapterUnloaded(BaseModel):
    """The adapter whose name is gone."""

    object: Literal["adapter.unloaded"] = "adapter.unloaded"
    name: str


ADAPTER_MODELS: Final[tuple[type, ...]] = (
    AdapterLoad,
    AdapterReport,
    AdapterList,
    AdapterUnloaded,
)
_NAME: Final = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "The adapter's name.",
    "schema": {"type": "string", "minLength": 1},
}
ADAPTER_ROUTES: Final = (
    AdminRoute(
        method="GET",
        path="/admin/adapters",
        handler="list_adapters",
        operation=admin_operation("listAdapters", AdapterList, "All adapters."),
    ),
    AdminRoute(
        method="POST",
        path="/admin/adapters",
        handler="load_adapter",
        operation=admin_operation(
            "loadAdapter",
            AdapterReport,
            "The adapter, which requests may name from now on.",
            body=AdapterLoad,
            conflicts=True,
        ),
    ),
    AdminRoute(
        method="DELETE",
        path="/admin/adapters/{name}",
        handler="unload_adapter",
        operation=admin_operation(
            "unloadAdapter", AdapterUnloaded, "The name is gone.", parameters=[_NAME]
        ),
    ),
)


class AdapterApi:
    """Handlers of authenticated requests. Each refuses principals without the admin scope.

    They raise GatewayErrors (AuthenticationError, PermissionDeniedError, NotFoundError,
    ConflictError, BadRequestError) and, where the engine does not run, EngineErrors.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        registry: AdapterRegistry,
        read_body: Callable[[Request], Awaitable[bytes]],
        change: Callable[[AdapterChange], Awaitable[None]] | None = None,
    ) -> None:
        """Store the arguments. `read_body` reads a JSON body, within the limits of all bodies.

        `change`: loads and unloads in all processes of this gateway; None: in this registry.
        """
        self._authenticator = authenticator
        self._registry = registry
        self._read_body = read_body
        self._change = registry.apply if change is None else change

    async def list_adapters(self, _: Request, principal: Principal) -> Response:
        """Return all adapters."""
        self._authenticator.require_admin(principal)
        data = [_report(entry) for entry in await self._registry.described()]
        return _json({"object": "list", "data": data})

    async def load_adapter(self, request: Request, principal: Principal) -> Response:
        """Read an adapter's files, and let requests name it."""
        self._authenticator.require_admin(principal)
        body = await self._read_body(request)
        try:
            wanted = AdapterLoad.model_validate_json(body)
        except ValidationError as error:
            raise bad_request(error, body) from None
        named = NamedAdapter(name=wanted.name, folder=wanted.path, tier=wanted.tier)
        await self._change(AdapterChange(name=wanted.name, wanted=named))
        logger.info("adapter loaded by=%s name=%s", principal.key_id, wanted.name)
        return _json(_report(self._registry.entry(wanted.name)))

    async def unload_adapter(self, request: Request, principal: Principal) -> Response:
        """Take an adapter's name away."""
        self._authenticator.require_admin(principal)
        name = request.path_params["name"]
        await self._change(AdapterChange(name=name))
        return _json({"object": "adapter.unloaded", "name": name})


def _report(entry: NamedEntry) -> dict[str, Any]:
    info = entry.info
    return {
        "object": "adapter",
        "name": entry.ref.name,
        "path": entry.ref.folder,
        "tier": "auto" if entry.is_routed else entry.ref.tier,
        "digest": None if info is None else info.digest,
        "max_rank": None if info is None else info.max_rank,
        "num_modules": None if info is None else info.num_modules,
        "num_bytes": None if info is None else info.num_bytes,
        "watched": entry.is_watched,
    }


def _json(document: dict[str, Any]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(document), headers=headers, media_type="application/json")
