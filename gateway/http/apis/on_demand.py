"""The endpoints of /admin/models: models on demand, loaded and put out by hand."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

from starlette.requests import Request

from outrider.gateway.audit.chain import Change
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.contract.schema.kinds import ModelState
from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.tenancy.keys.admin_handlers import AdminCall, AdminHandlers, admin
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.upstream.on_demand.model import OnDemandModel


class OnDemandReport(CompleteModel, kw_only=True):
    """A model on demand."""

    object: Literal["model.on_demand"] = "model.on_demand"
    name: Annotated[str, says("The tier, which requests name.")]
    state: ModelState
    memory_bytes: Annotated[int, says("What it is taken to need.")]
    num_in_flight: int
    num_waiting: Annotated[int, says("Requests that wait until it is loaded.")]
    idle_s: Annotated[float | None, says("Since its last request; null where it is not loaded.")]
    keep_alive_s: Annotated[float | None, says("Null: until another model needs its memory.")]
    load_s: Annotated[float | None, says("What loading took the last time; null before.")]
    num_loads: Annotated[int, says("Since the gateway's start.")]
    num_evictions: Annotated[int, says("Times that it was put out, for whatever reason.")]
    reason: Annotated[str, says("Why it could not be loaded; empty where it could.")]


class OnDemandList(CompleteModel, kw_only=True):
    """All models on demand, in the order of the settings."""

    object: Literal["list"] = "list"
    data: list[OnDemandReport]


class OnDemandApi(AdminHandlers):
    """Handlers of models on demand; loading raises UnavailableError where there is no room."""

    def __init__(
        self,
        authenticator: Authenticator,
        models: Mapping[str, OnDemandModel],
        read_body: Callable[[Request], Awaitable[bytes]],
        audit: AuditLog,
    ) -> None:
        super().__init__(authenticator, read_body)
        self._models = models
        self._audit = audit

    @admin("GET", "/admin/models", "All models on demand.")
    async def list_models_on_demand(self, _: AdminCall) -> OnDemandList:
        """Return all models on demand."""
        return OnDemandList(data=[*map(_report, self._models.values())])

    @admin("POST", "/admin/models/{model}/load", "The model, which is loaded.")
    async def load_model(self, call: AdminCall) -> OnDemandReport:
        """Load a model before a request names it; where that has failed, try it again now."""
        model = self._named(call)
        async with self._audit.changing(Change(action="model.load", target=f"model/{model.name}")):
            await model.load()
        return _report(model)

    @admin("POST", "/admin/models/{model}/unload", "The model, which is put out.", conflicts=True)
    async def unload_model(self, call: AdminCall) -> OnDemandReport:
        """Put a model out that no request needs."""
        model = self._named(call)
        change = Change(action="model.unload", target=f"model/{model.name}")
        async with self._audit.changing(change):
            await model.unload()
        return _report(model)

    def _named(self, call: AdminCall) -> OnDemandModel:
        """Return the model in the path. Raises NotFoundError."""
        name = call.name("model")
        if name not in self._models:
            known = ", ".join(self._models) or "none"
            raise NotFoundError(f"No model on demand is called {name!r}; there are: {known}.")
        return self._models[name]


def _report(model: OnDemandModel) -> OnDemandReport:
    return OnDemandReport(
        name=model.name,
        state=model.state,
        memory_bytes=model.needs.memory_bytes,
        num_in_flight=model.num_in_flight,
        num_waiting=model.num_waiting,
        idle_s=model.idle_s,
        keep_alive_s=model.needs.keep_alive_s,
        load_s=model.load_s,
        num_loads=model.counts.num_loads,
        num_evictions=model.counts.put_out.total(),
        reason=model.reason,
    )
