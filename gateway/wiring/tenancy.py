"""Tenants as the settings want them: keys, limits and the ledger, over one database."""

import time

from prometheus_client import CollectorRegistry

from outrider.gateway.audit.log import AuditLog
from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.key_metrics import TenantMetrics
from outrider.gateway.tenancy.keys.key_parts import build_key_parts
from outrider.gateway.tenancy.ledger.book import Ledger, NullLedger
from outrider.gateway.tenancy.ledger.end_users import end_user_form
from outrider.gateway.tenancy.ledger.history import usage_history
from outrider.gateway.tenancy.ledger.journal import journal_folder
from outrider.gateway.tenancy.ledger.ledger_metrics import LedgerMetrics
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.writer import JournaledLedger
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.limiter import Limiter
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.limits.presence import GatewayPresence
from outrider.gateway.tenancy.limits.redis_limiter import RedisLimiter
from outrider.gateway.tenancy.limits.unlimited import UncountedLimits
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.sign_in import build_sign_in


def build_tenancy(settings: Settings, registry: CollectorRegistry) -> Tenancy:
    """Open the database and bring it up to date; blocks meanwhile. Raises SettingsError."""
    prices = PriceBook.from_settings(settings)
    database = open_database(settings)
    limit_metrics = LimitMetrics(registry)
    keys = build_key_parts(settings, database, TenantMetrics(registry))
    if settings.sign_in.issuers:
        keys.authenticator.sign_in = build_sign_in(settings, keys, registry)
    return Tenancy(
        keys=keys,
        limiter=_build_limiter(settings, database, limit_metrics),
        ledger=_build_ledger(settings, database, prices, registry),
        prices=prices,
        end_user_form=end_user_form(settings.ledger, lambda: keys.hasher),
        database=database,
        audit=AuditLog(database),
        presence=_build_presence(settings, database, limit_metrics),
    )


def _build_limiter(settings: Settings, database: Database | None, metrics: LimitMetrics) -> Limiter:
    if settings.redis_url is not None:
        return RedisLimiter.from_url(settings.redis_url, metrics=metrics)
    if settings.server.workers > 1:
        return UncountedLimits()
    if database is None or not settings.ledger.enabled:
        return MemoryLimiter(metrics=metrics)
    return MemoryLimiter(metrics=metrics, history=lambda: usage_history(database, time.time()))


def _build_presence(
    settings: Settings, database: Database | None, metrics: LimitMetrics
) -> GatewayPresence | None:
    if database is None or settings.redis_url is not None or settings.server.workers > 1:
        return None  # nothing is counted in this process's memory
    return GatewayPresence(database, metrics)


def _build_ledger(
    settings: Settings, database: Database | None, prices: PriceBook, registry: CollectorRegistry
) -> Ledger:
    if database is None or not settings.ledger.enabled:
        return NullLedger()
    return JournaledLedger(
        database=database,
        journal=journal_folder(settings, database),
        settings=settings.ledger,
        prices=prices,
        metrics=LedgerMetrics(registry),
    )
