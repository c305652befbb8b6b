"""Endpoints about the gateway itself: models, health, readiness, metrics."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Final

from fastapi import Request
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineStats
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.model_catalog import ListedModel
from outrider.gateway.answering.reading.parsed_request import check_model, tier_not_allowed
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import (
    GatewayError,
    NotFoundError,
    UnavailableError,
)
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.loaded_limits import LoadedLimits
from outrider.gateway.contract.schema.model_cards import (
    ModelCard,
    ModelList,
    NamedModels,
    TierCard,
    UpstreamCard,
    named_model,
)
from outrider.gateway.contract.schema.responses import (
    Health,
    Readiness,
    ReplicaCount,
    ServerLoad,
    Version,
)
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.http.apis.prices import card_of
from outrider.gateway.http.server.auth_dispatcher import principal_of
from outrider.gateway.http.server.veil import veil_for, veiled_card
from outrider.gateway.receipts.signing_keys import NoSigningKeyError
from outrider.gateway.settings.extras import own_version
from outrider.gateway.tenancy.keys.keys import Principal, Scopes
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics, engine_families
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.workers.merging import Families, collected, exposition
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S: Final = 2.0
_FAMILIES_AT_ONCE: Final = 16
"""So many metrics are written as text within about a third of a millisecond."""
_ANTHROPIC: Final = "anthropic-version"
"""The header by which clients of Anthropic's API are known."""
_KEYS_AGE_S: Final = 3600
_LOAD: Final = frozenset(
    {
        "outrider_num_requests_running",
        "outrider_num_requests_waiting",
        "outrider_upstream_in_flight",
    }
)
"""The gauges of requests under way, here and at upstream servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusEndpoints:
    """Describes the gateway to clients, load balancers and Prometheus."""

    engine: EngineClient
    jobs: JobBuilder
    catalog: LiveModelCatalog
    chains: ChainBook
    upstream: UpstreamParts
    tenancy: Tenancy
    metrics: GatewayMetrics
    fleet: EnginePool | None = None
    siblings: Siblings | None = None

    async def receipt_keys(self) -> Response:
        """Publish the keys that receipts are signed with. Raises NotFoundError without any."""
        try:
            ring = await asyncio.to_thread(self.jobs.keys.ring)
        except NoSigningKeyError as error:
            raise NotFoundError(f"This gateway signs no receipts: {error}.") from None
        return json_response(ring.jwks(), {"cache-control": f"public, max-age={_KEYS_AGE_S}"})

    async def models(self, request: Request) -> Response:
        """List the names that `model` accepts, of this key."""
        cards = await self.cards(principal_of(request))
        if _ANTHROPIC not in request.headers:
            return json_response(ModelList(object="list", data=cards))
        named = [named_model(card) for card in cards]
        first, last = (named[0].id, named[-1].id) if named else (None, None)
        return json_response(NamedModels(named, False, first, last))

    async def model(self, model_id: str, request: Request) -> Response:
        """Describe one of the names that `model` accepts."""
        card = await self.card(model_id, principal_of(request))
        return json_response(named_model(card) if _ANTHROPIC in request.headers else card)

    async def cards(self, principal: Principal) -> list[ModelCard]:
        """Return the cards of the names that a key may use."""
        names = await self.catalog.refreshed()
        shown = (_usable(principal.scopes, model) for model in names.all_listed())
        return [self._card(model, principal) for model in shown if model is not None]

    async def card(self, model_id: str, principal: Principal) -> ModelCard:
        """Return the card of one name. Raises GatewayError where the key may not use it."""
        check_model(principal, model_id)
        names = await self.catalog.refreshed()
        model = _usable(principal.scopes, names.listed(model_id, principal.scopes))
        if model is None:
            raise tier_not_allowed(model_id)
        return self._card(model, principal)

    def _card(self, model: ListedModel, principal: Principal) -> ModelCard:
        """Return a card with prices, and the tiers that its model reveals to the key."""
        veil = veil_for(self.chains, model.id, principal)
        model = replace(model, behind=[*map(self._with_state, model.behind)])
        return veiled_card(card_of(model, self.tenancy.prices), veil)

    def _with_state(self, card: TierCard | UpstreamCard) -> TierCard | UpstreamCard:
        """Return a card that tells whether a model on demand is loaded."""
        if not isinstance(card, UpstreamCard):
            return card
        return structs.replace(card, state=self.upstream.state_of(card.tier))

    async def health(self) -> Response:
        """Report that the process is alive."""
        return json_response(Health(status="ok"))

    async def ready(self) -> Response:
        """Report whether a request would be served now, or once an engine was started for it."""
        upstream = self.upstream
        has_upstream = upstream.rules.policy != "local_only" and any(
            tier.is_available for tier in upstream.tiers.values()
        )
        if not has_upstream and not upstream.rules.has_local:
            waits_s = [tier.retry_after_s for tier in upstream.tiers.values()]
            raise UnavailableError(
                "No upstream tier takes requests now, and no model is loaded on this machine.",
                retry_after_s=min(waits_s),
            )
        is_asleep = self.fleet is not None and self.fleet.is_asleep
        if not has_upstream and not is_asleep:
            self.jobs.models.require_ready()
            await self.jobs.models.engine_info()
        workers = replicas = None
        if self.siblings is not None:
            workers = ReplicaCount(up=self.siblings.num_up, of=self.siblings.num_workers)
        if self.fleet is not None:
            states = self.fleet.states()
            replicas = ReplicaCount(up=sum(state.is_up for state in states), of=len(states))
        return json_response(Readiness(ready=True, workers=workers, replicas=replicas))

    async def version(self) -> Response:
        """Return the version of this gateway."""
        return json_response(Version(version=own_version()))

    async def load(self, request: Request) -> Response:
        """Return how many requests are under way, to those who may read the metrics."""
        self._require_metrics(request)
        families = await self.families()
        samples = [each for family in families if family.name in _LOAD for each in family.samples]
        return json_response(ServerLoad(server_load=int(sum(each.value for each in samples))))

    def _require_metrics(self, request: Request) -> None:
        """Raise PermissionDeniedError for a key without the scope, where keys are required."""
        keys = self.tenancy.keys
        if not keys.has_open_metrics:
            keys.authenticator.require_metrics(principal_of(request))

    async def expose_metrics(self, request: Request) -> Response:
        """Return Prometheus text, for keys with the metrics scope where keys are required."""
        self._require_metrics(request)
        families, written = await self.families(), []
        for start in range(0, len(families), _FAMILIES_AT_ONCE):
            written.append(exposition(families[start : start + _FAMILIES_AT_ONCE]))
            await asyncio.sleep(0)  # streams have a turn
        return Response(b"".join(written), media_type=CONTENT_TYPE_LATEST)

    async def families(self) -> Families:
        """Return the metrics of all of the gateway's processes. Raises UnavailableError."""
        stats = None
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await self.stats()
        except (TimeoutError, EngineError) as error:
            logger.warning("no engine statistics error=%s", type(error).__name__)
        if self.siblings is None:
            own = collected(self.metrics.registry)
        else:
            own = await self.siblings.metrics()
        return [*engine_families(stats), *own]

    async def stats(self) -> EngineStats | None:
        """Return the engine's snapshot; None while it is not there. Raises EngineError."""
        return await self.engine.stats() if self.engine.is_ready else None

    async def limits(self) -> LoadedLimits | None:
        """Return the limits of the loaded models; None while the engine is not ready."""
        try:
            names = await self.jobs.models.names()
        except (GatewayError, EngineError):
            return None
        tiers = names[AUTO]
        if not tiers:
            return None
        return LoadedLimits(
            names=None if self.upstream.tiers else tuple(names),
            max_context=max(info.max_context for info in tiers),
            vocab_size=max(info.vocab_size for info in tiers),
        )


def _usable(scopes: Scopes, model: ListedModel) -> ListedModel | None:
    """Return a name with the tiers that a key may use; None where it may use none."""
    tiers = [tier for tier in model.behind if scopes.allows_tier(tier.tier)]
    is_hidden = bool(model.behind) and not tiers
    return None if is_hidden or not scopes.allows_model(model.id) else replace(model, behind=tiers)
