"""The endpoints of /admin/adapters."""

import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from outrider.gateway.audit.chain import Change
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.contract.schema.structs import CompleteModel
from outrider.gateway.engines.adapters.registry import AdapterChange, AdapterRegistry, NamedEntry
from outrider.gateway.settings.adapters import ADAPTER_NAME, AdapterTier, NamedAdapter
from outrider.gateway.tenancy.keys.admin_handlers import AdminCall, AdminHandlers, admin
from outrider.gateway.tenancy.keys.authenticator import Authenticator

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


class AdapterReport(CompleteModel, kw_only=True):
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


class AdapterList(CompleteModel, kw_only=True):
    """All adapters that have a name, by name."""

    object: Literal["list"] = "list"
    data: list[AdapterReport]


class AdapterUnloaded(CompleteModel, kw_only=True):
    """The adapter whose name is gone."""

    object: Literal["adapter.unloaded"] = "adapter.unloaded"
    name: str


class AdapterApi(AdminHandlers):
    """Handlers of adapters; they also raise EngineErrors where the engine does not run."""

    def __init__(
        self,
        authenticator: Authenticator,
        registry: AdapterRegistry,
        read_body: Callable[[Request], Awaitable[bytes]],
        change: Callable[[AdapterChange], Awaitable[None]] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`change` loads and unloads in all processes of this gateway; None: in this registry."""
        super().__init__(authenticator, read_body)
        self._registry = registry
        self._change = registry.apply if change is None else change
        self._audit = audit or AuditLog()

    @admin("GET", "/admin/adapters", "All adapters.")
    async def list_adapters(self, _: AdminCall) -> AdapterList:
        """Return all adapters."""
        return AdapterList(data=[*map(_report, await self._registry.described())])

    @admin(
        "POST",
        "/admin/adapters",
        "The adapter, which requests may name from now on.",
        conflicts=True,
    )
    async def load_adapter(self, call: AdminCall, wanted: AdapterLoad) -> AdapterReport:
        """Read an adapter's files, and let requests name it."""
        named = NamedAdapter(name=wanted.name, folder=wanted.path, tier=wanted.tier)
        entry = Change(
            action="adapter.load", target=f"adapter/{wanted.name}", after=wanted.model_dump()
        )
        async with self._audit.changing(entry):
            await self._change(AdapterChange(name=wanted.name, wanted=named))
        logger.info("adapter loaded by=%s name=%s", call.by, wanted.name)
        return _report(self._registry.entry(wanted.name))

    @admin("DELETE", "/admin/adapters/{adapter}", "The name is gone.")
    async def unload_adapter(self, call: AdminCall) -> AdapterUnloaded:
        """Take an adapter's name away."""
        name = call.name("adapter")
        async with self._audit.changing(Change(action="adapter.unload", target=f"adapter/{name}")):
            await self._change(AdapterChange(name=name))
        return AdapterUnloaded(name=name)


def _report(entry: NamedEntry) -> AdapterReport:
    info = entry.info
    return AdapterReport(
        name=entry.ref.name,
        path=entry.ref.folder,
        tier="auto" if entry.is_routed else entry.ref.tier,
        digest=None if info is None else info.digest,
        max_rank=None if info is None else info.max_rank,
        num_modules=None if info is None else info.num_modules,
        num_bytes=None if info is None else info.num_bytes,
        watched=entry.is_watched,
    )
