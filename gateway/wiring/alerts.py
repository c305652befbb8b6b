"""Alerts as the settings want them, over the parts of a gateway."""

from outrider.gateway.alerts.conditions import Source
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.alerts.sources import breakers, budgets, drift, replicas
from outrider.gateway.alerts.watching import AlertWatch, SourceWatch
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.storage.database import Database
from outrider.gateway.wiring.gateway_parts import GatewayParts


def build_alerts(parts: GatewayParts, fleet: EnginePool | None) -> AlertWatch | None:
    """Return what watches; None where no webhook is set."""
    settings, tenancy = parts.alerts, parts.tenancy
    if settings.url is None:
        return None
    servers = {name: tier.replicas for name, tier in parts.upstream.tiers.items()}
    sources: list[Source] = [breakers(servers)]
    if fleet is not None:
        sources.append(replicas(fleet.states))
    if parts.routing.guard is not None:
        sources.append(drift(parts.routing.guard))
    is_first = parts.siblings is None or parts.siblings.number == 1
    if tenancy.database is not None and tenancy.keys.registry is not None and is_first:
        source = budgets(tenancy.database, tenancy.keys.registry, settings.budget_shares)
        sources.append(source)
    webhook = Webhook(settings, parts.metrics.registry)
    database = tenancy.database or Database(None)
    watches = [
        SourceWatch(source, database, webhook, window_s=settings.window_s) for source in sources
    ]
    return AlertWatch(watches, webhook)
