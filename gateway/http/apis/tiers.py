"""The endpoint of /admin/tiers: each tier's health and prices."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from msgspec.structs import replace
from starlette.requests import Request

from outrider.engine.errors import EngineError, EngineNotStartedError
from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.local_models import LocalModels
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.model_cards import Pricing
from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.http.apis.prices import pricing_of
from outrider.gateway.tenancy.keys.admin_handlers import AdminCall, AdminHandlers, admin
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.upstream.breaker import BreakerState
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.verifier.params import TIERS, Tier


class TierServer(CompleteModel, kw_only=True):
    """A server of an upstream tier."""

    name: str
    breaker: BreakerState
    is_ejected: Annotated[bool, says("It is slower than the others, and left out for a while.")]
    num_in_flight: int


class TierReport(CompleteModel, kw_only=True):
    """A tier as this process of the gateway sees it."""

    object: Literal["tier"] = "tier"
    name: str
    is_local: bool
    model: Annotated[str | None, says("Null where it is not known.")]
    is_available: bool
    reason: Annotated[str, says("Why it takes no requests; empty where it does.")]
    ttft_p50_ms: Annotated[float | None, says("Null for local tiers, and before 20 streams.")]
    servers: Annotated[list[TierServer], says("None for local tiers: see /admin/replicas.")]
    pricing: Annotated[Pricing | None, says("What clients pay; null without prices.")]
    cost: Annotated[Pricing | None, says("What the operator pays; null without prices.")]


class TierList(CompleteModel, kw_only=True):
    """All tiers, the local ones first."""

    object: Literal["list"] = "list"
    data: list[TierReport]


class TierApi(AdminHandlers):
    """Handlers of tiers."""

    def __init__(
        self,
        authenticator: Authenticator,
        models: LocalModels,
        catalog: LiveModelCatalog,
        upstream: UpstreamParts,
        prices: PriceBook,
        read_body: Callable[[Request], Awaitable[bytes]],
    ) -> None:
        super().__init__(authenticator, read_body)
        self._models = models
        self._catalog = catalog
        self._upstream = upstream
        self._prices = prices

    @admin("GET", "/admin/tiers", "All tiers.")
    async def list_tiers(self, _: AdminCall) -> TierList:
        """Return the health and the prices of all tiers."""
        local = await self._local() if self._upstream.rules.has_local else []
        upstream = [await self._of_upstream(tier) for tier in self._upstream.tiers.values()]
        return TierList(data=[*local, *upstream])

    async def _local(self) -> list[TierReport]:
        """Describe the loaded tiers, and those that the settings name."""
        infos: dict[Tier, TierInfo] = {}
        reason = ""
        try:
            infos = dict((await self._models.engine_info()).tiers)
            if not self._models.engine.is_paused:
                self._models.require_ready()
        except EngineNotStartedError:
            pass  # the first request has one started
        except (GatewayError, EngineError) as error:
            reason = str(error)
        return [
            self._report(tier, infos[tier].model_id if tier in infos else None, reason)
            for tier in TIERS
            if tier in infos or tier in self._models.loaded
        ]

    async def _of_upstream(self, tier: UpstreamTier) -> TierReport:
        median_s = tier.first_token.quantile(0.5)
        report = self._report(
            tier.name,
            tier.settings.model or await self._listed_model(tier.name),
            "" if tier.is_available else "None of its servers takes requests.",
        )
        return replace(
            report,
            is_local=False,
            ttft_p50_ms=None if median_s is None else median_s * 1000,
            servers=[
                TierServer(
                    name=server.name,
                    breaker=server.breaker.state,
                    is_ejected=server.ejected_until_s is not None,
                    num_in_flight=server.in_flight,
                )
                for server in tier.replicas.replicas
            ],
        )

    async def _listed_model(self, tier: str) -> str | None:
        """Return the model that the tier's server lists first, as far as that is known."""
        try:
            return (await self._catalog.current()).usual_model(tier)
        except (GatewayError, EngineError):
            return None

    def _report(self, name: str, model: str | None, reason: str) -> TierReport:
        """Describe a local tier, and an upstream one as far as they are alike."""
        is_known = self._prices.is_known(name)
        return TierReport(
            name=name,
            is_local=True,
            model=model,
            is_available=not reason,
            reason=reason,
            ttft_p50_ms=None,
            servers=[],
            pricing=pricing_of([self._prices.charge_of(name)]) if is_known else None,
            cost=pricing_of([self._prices.cost_of(name)]) if is_known else None,
        )
