"""Files and batches as the settings want them."""

import asyncio
import secrets
import time
from decimal import Decimal
from typing import Final

from outrider.gateway.http.apis.batches.calls import IdleGate
from outrider.gateway.http.apis.batches.leases import BatchLeases
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.http.apis.batches.runner import BatchRunner
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.http.apis.batches.work import WorkParts
from outrider.gateway.http.server.batch_calls import BatchCalls
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
        store.make_folder()
    except OSError as error:
        raise SettingsError(
            f"batches.folder: {store.folder} cannot be made: {error.strerror}"
        ) from None
    return store


def batch_store(settings: Settings, database: Database) -> BatchStore:
    """Return the store of a database, also where batches are off now."""
    options = settings.batches
    place = folder_beside(database, _SUFFIX) if options.folder is None else options.folder
    return BatchStore(database, place.expanduser().absolute(), options, time.time)


def build_batch_runner(
    parts: GatewayParts,
    answers: AnswerEndpoints,
    passing: PassThroughEndpoints,
    status: StatusEndpoints,
) -> BatchRunner | None:
    """Join a store with what answers requests; None without batches."""
    store = parts.batches
    if store is None:
        return None
    options, tenancy, tiers = store.settings, parts.tenancy, parts.upstream.tiers
    prices = tenancy.prices.charging(Decimal(repr(options.price)))
    metrics = BatchMetrics(parts.metrics.registry)
    authenticator = tenancy.keys.authenticator

    def upstream_load() -> int:
        return sum(each.in_flight for tier in tiers.values() for each in tier.replicas.replicas)

    work = WorkParts(
        store=store,
        leases=BatchLeases(
            store.database, tenancy.ledger, prices, secrets.token_hex(16), store.wall_clock
        ),
        ask=BatchCalls(
            answers,
            passing,
            prices=prices,
            principal_of=authenticator.principal_of,
            max_concurrent=options.concurrent_requests,
        ),
        gate=IdleGate(
            read_stats=status.stats,
            upstream_load=upstream_load,
            max_others=options.max_other_requests,
            tell_held=metrics.is_held.set,
        ),
        key_error=authenticator.gone,
        slots=asyncio.Semaphore(options.concurrent_requests),
        metrics=metrics,
        max_body_bytes=parts.limits.max_body_bytes,
    )
    return BatchRunner(work)
