"""Files and batches as the settings want them."""

import asyncio
import secrets
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from prometheus_client import CollectorRegistry

from outrider.gateway.http.apis.batches.batch_endpoints import BatchEndpoints
from outrider.gateway.http.apis.batches.calls import IdleGate
from outrider.gateway.http.apis.batches.file_endpoints import FileEndpoints
from outrider.gateway.http.apis.batches.folder import FileFolder
from outrider.gateway.http.apis.batches.leases import BatchLeases
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.http.apis.batches.output import OutputWriter
from outrider.gateway.http.apis.batches.runner import BatchRunner
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.http.apis.batches.work import WorkParts
from outrider.gateway.http.server.batch_calls import BatchCalls
from outrider.gateway.http.server.batch_routes import BatchRoutes
from outrider.gateway.http.server.endpoints import AnswerEndpoints
from outrider.gateway.http.server.pass_through_endpoints import PassThroughEndpoints
from outrider.gateway.http.server.status import StatusEndpoints
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.ledger.journal import folder_beside
from outrider.gateway.wiring.gateway_parts import GatewayParts

_SUFFIX: Final = ".files"


def build_batch_store(settings: Settings, database: Database | None) -> BatchStore | None:
    """Build the store and make its folder; None without batches. Raises SettingsError."""
    if not settings.batches.enabled or database is None:
        return None
    store = batch_store(settings, database)
    try:
        store.folder.open()
    except OSError as error:
        raise SettingsError(
            f"batches.folder: {store.folder.folder} cannot be made: {error.strerror}"
        ) from None
    return store


def batch_store(settings: Settings, database: Database) -> BatchStore:
    """Return the store of a database, also where batches are off now."""
    options = settings.batches
    place = folder_beside(database, _SUFFIX) if options.folder is None else options.folder
    folder = FileFolder(place.expanduser().absolute())
    return BatchStore(database, folder, options, time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The endpoints of batches, and what works on them; None where there are none."""

    routes: BatchRoutes
    runner: BatchRunner | None


def build_batches(
    parts: GatewayParts,
    answers: AnswerEndpoints,
    passing: PassThroughEndpoints,
    status: StatusEndpoints,
) -> Batches:
    """Join a store with what answers requests."""
    store = parts.batches
    runner = None if store is None else _build_runner(parts, store, answers, passing, status)
    routes = BatchRoutes(
        files=FileEndpoints(store=store),
        batches=BatchEndpoints(store=store, wake=_nothing if runner is None else runner.wake),
    )
    return Batches(routes=routes, runner=runner)


def _build_runner(
    parts: GatewayParts,
    store: BatchStore,
    answers: AnswerEndpoints,
    passing: PassThroughEndpoints,
    status: StatusEndpoints,
) -> BatchRunner:
    options, tenancy = store.settings, parts.tenancy
    prices = tenancy.prices.charging(Decimal(repr(options.price)))
    registry: CollectorRegistry = parts.metrics.registry
    metrics = BatchMetrics(registry)
    authenticator = tenancy.keys.authenticator
    leases = BatchLeases(
        store.database, tenancy.ledger, prices, secrets.token_hex(16), store.wall_clock
    )
    tiers = parts.upstream.tiers
    work = WorkParts(
        store=store,
        leases=leases,
        writer=OutputWriter(store.folder, leases, store.wall_clock, parts.limits.max_body_bytes),
        ask=BatchCalls(
            answers,
            passing,
            prices=prices,
            principal_of=authenticator.principal_of,
            max_concurrent=options.concurrent_requests,
        ),
        gate=IdleGate(
            status.stats,
            lambda: sum(
                each.in_flight for tier in tiers.values() for each in tier.replicas.replicas
            ),
            options.max_other_requests,
            metrics,
        ),
        key_error=authenticator.gone,
        slots=asyncio.Semaphore(options.concurrent_requests),
        metrics=metrics,
        max_body_bytes=parts.limits.max_body_bytes,
    )
    return BatchRunner(work)


def _nothing() -> None:
    """There is no runner to wake."""
