"""Joins a gateway's parts into the HTTP application."""

from dataclasses import replace
from functools import partial

from outrider.gateway.answering.candidates.arm_check import arm_check
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.pass_through import PassThrough
from outrider.gateway.answering.candidates.planner import Planner
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.named_prompts import NamedPrompts
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.engines.adapters.admin import AdapterApi
from outrider.gateway.engines.adapters.registry import AdapterChange, AdapterRegistry
from outrider.gateway.engines.adapters.watcher import AdapterWatcher
from outrider.gateway.engines.backends.pause_metrics import PauseMetrics
from outrider.gateway.engines.fleet.admin import GroupChange, ReplicaApi
from outrider.gateway.engines.fleet.fleet_metrics import FleetMetrics
from outrider.gateway.experiments.admin import ExperimentApi
from outrider.gateway.experiments.feedback import FeedbackApi
from outrider.gateway.http.apis.audit import AuditApi
from outrider.gateway.http.apis.named_prompts import PromptApi
from outrider.gateway.http.apis.ollama.endpoints import OllamaEndpoints
from outrider.gateway.http.apis.on_demand import OnDemandApi
from outrider.gateway.http.apis.responses.endpoints import StoredEndpoints
from outrider.gateway.http.apis.tiers import TierApi
from outrider.gateway.http.dashboard.api import DashboardApi, DashboardSources
from outrider.gateway.http.dashboard.experiments import experiment_documents
from outrider.gateway.http.dashboard.recent import RecentOutcomes
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.http.server.app import Routes, create_app
from outrider.gateway.http.server.auth_dispatcher import AuthDispatcher
from outrider.gateway.http.server.batch_routes import BatchRoutes
from outrider.gateway.http.server.endpoints import RequestIntake
from outrider.gateway.http.server.lifespan import Lifespan
from outrider.gateway.http.server.pages import Pages
from outrider.gateway.http.server.pass_through_endpoints import PassThroughEndpoints
from outrider.gateway.http.server.route_metrics import RouteCollector
from outrider.gateway.http.server.status import StatusEndpoints
from outrider.gateway.telemetry.loop_lag import LoopLag
from outrider.gateway.tenancy.keys.admin import AdminApi
from outrider.gateway.tenancy.ledger.usage_api import UsageApi
from outrider.gateway.wiring.alerts import build_alerts
from outrider.gateway.wiring.alias_routers import alias_routers
from outrider.gateway.wiring.answering import (
    build_adapters,
    build_answers,
    build_catalog,
    build_intake,
    build_jobs,
    build_planner,
)
from outrider.gateway.wiring.batches import build_batch_runner
from outrider.gateway.wiring.checks import finding_names
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.responses import conversations
from outrider.gateway.wiring.sign_in import sign_in_endpoints
from outrider.gateway.workers.line import Handler
from outrider.gateway.workers.merging import Families, collected
from outrider.gateway.workers.siblings import Siblings


def build_app(parts: GatewayParts) -> AuthDispatcher:
    """Build the application without starting it."""
    if parts.routing.guard is not None:
        parts.metrics.registry.register(RouteCollector(parts.routing.guard))
    parts.metrics.registry.register(PauseMetrics(parts.engine))
    adapters = build_adapters(parts)
    load = LocalLoad(parts.clock)
    jobs = build_jobs(parts, adapters, load)
    chains = ChainBook(aliases=parts.aliases, routers=alias_routers(parts, load))
    catalog = build_catalog(parts, jobs, chains)
    parts = finding_names(parts, catalog, chains)
    planner = build_planner(parts, jobs, catalog, chains, load)
    recent = RecentOutcomes(clock=parts.clock)
    intake = build_intake(parts, recent)
    status = _build_status(parts, jobs, catalog, chains)
    loop_lag = LoopLag(parts.metrics.registry)
    dashboard = _build_dashboard(parts, recent, status, loop_lag)
    keys = parts.tenancy.keys
    prompts = NamedPrompts(jobs=jobs)
    answers = build_answers(parts, intake, planner, jobs, chains, catalog)
    passing = PassThroughEndpoints(
        intake=intake,
        checks=parts.checks,
        passing=PassThrough(upstream=parts.upstream, names=catalog, chains=chains),
    )
    batches = build_batch_runner(parts, answers, passing, status)
    routes = Routes(
        answers=answers,
        ollama=_build_ollama(parts, status, catalog, intake),
        status=status,
        pages=Pages(),
        dashboard=dashboard,
        usage=UsageApi(
            parts.tenancy.database,
            parts.tenancy.ledger,
            end_user_form=parts.tenancy.end_user_form,
            siblings=parts.siblings,
        ),
        admin=AdminApi(
            keys,
            intake.read_small_body,
            siblings=parts.siblings,
            upstream_tiers=tuple(parts.upstream.tiers),
        ),
        adapters=_build_adapter_api(parts, adapters, intake),
        replicas=_build_replica_api(parts, status, intake),
        tiers=TierApi(
            keys.authenticator,
            jobs.models,
            catalog,
            parts.upstream,
            parts.tenancy.prices,
            intake.read_small_body,
        ),
        on_demand=OnDemandApi(
            keys.authenticator,
            {} if parts.upstream.pool is None else parts.upstream.pool.models,
            intake.read_small_body,
            parts.tenancy.audit,
        ),
        prompts=PromptApi(
            keys.authenticator,
            keys.registry,
            prompts,
            intake.read_small_body,
            siblings=parts.siblings,
            audit=parts.tenancy.audit,
        ),
        audit=AuditApi(keys.authenticator, intake.read_small_body, parts.tenancy.audit),
        experiments=_build_experiment_api(parts, planner, intake),
        feedback=FeedbackApi(parts.experiments.feedback),
        intake=intake,
        lifespan=replace(
            _build_lifespan(parts, jobs, adapters, dashboard, loop_lag, status, prompts),
            batches=batches,
        ),
        authenticate=keys.authenticator.authenticate,
        foreign_pages=ForeignPages.of(parts.http),
        has_open_metrics=keys.has_open_metrics,
        upstream_tiers=tuple(parts.upstream.tiers),
        stored=StoredEndpoints(conversations=conversations(parts)),
        passing=passing,
        batches=BatchRoutes(runner=batches),
        sign_in=sign_in_endpoints(parts.tenancy.keys.authenticator, parts.sign_in),
    )
    if parts.siblings is not None:
        _serve_siblings(parts, parts.siblings, routes, adapters)
    return create_app(routes)


def _build_status(
    parts: GatewayParts, jobs: JobBuilder, catalog: LiveModelCatalog, chains: ChainBook
) -> StatusEndpoints:
    fleet = jobs.models.fleet
    if fleet is not None:
        parts.metrics.registry.register(FleetMetrics(fleet))
    return StatusEndpoints(
        engine=parts.engine,
        jobs=jobs,
        catalog=catalog,
        chains=chains,
        upstream=parts.upstream,
        tenancy=parts.tenancy,
        metrics=parts.metrics,
        fleet=fleet,
        siblings=parts.siblings,
    )


def _build_ollama(
    parts: GatewayParts, status: StatusEndpoints, catalog: LiveModelCatalog, intake: RequestIntake
) -> OllamaEndpoints:
    return OllamaEndpoints(
        cards=status,
        catalog=catalog,
        read_body=intake.read_small_body,
        ignores_unknown=parts.unknown_fields == "ignore",
    )


def _build_experiment_api(
    parts: GatewayParts, planner: Planner, intake: RequestIntake
) -> ExperimentApi:
    return ExperimentApi(
        parts.tenancy.keys.authenticator,
        parts.experiments,
        intake.read_small_body,
        arm_check(planner, parts.clock),
        parts.siblings,
    )


def _build_adapter_api(
    parts: GatewayParts, adapters: AdapterRegistry, intake: RequestIntake
) -> AdapterApi:
    return AdapterApi(
        parts.tenancy.keys.authenticator,
        adapters,
        intake.read_small_body,
        None if parts.siblings is None else partial(_change_everywhere, parts.siblings),
        parts.tenancy.audit,
    )


def _build_replica_api(
    parts: GatewayParts, status: StatusEndpoints, intake: RequestIntake
) -> ReplicaApi:
    return ReplicaApi(
        parts.tenancy.keys.authenticator,
        status.fleet,
        intake.read_small_body,
        None if parts.siblings is None else partial(_hold_everywhere, parts.siblings),
        parts.tenancy.audit,
    )


def _serve_siblings(
    parts: GatewayParts, siblings: Siblings, routes: Routes, adapters: AdapterRegistry
) -> None:
    """Do for the gateway's other processes what they ask for."""

    async def snapshot(_: object) -> Families:
        return collected(parts.metrics.registry)

    handlers: dict[str, Handler] = {
        "snapshot": snapshot,
        "dashboard": routes.dashboard.figures_here,
        "flush_ledger": routes.usage.flush,
        "read_keys": routes.admin.look_again,
        "forget_prompt": routes.prompts.forget,
        "read_experiments": routes.experiments.read_again,
        "find_request": parts.experiments.feedback.find_here,
    }
    for name, handler in handlers.items():
        siblings.on(name, handler)
    siblings.on_change(partial(_apply, adapters, routes.replicas))
    parts.experiments.feedback.siblings = siblings


async def _apply(
    adapters: AdapterRegistry, replicas: ReplicaApi, change: AdapterChange | GroupChange
) -> None:
    """Make a change that one of the gateway's processes was asked for."""
    if isinstance(change, GroupChange):
        await replicas.apply(change)
    else:
        await adapters.apply(change)


async def _hold_everywhere(siblings: Siblings, change: GroupChange) -> None:
    await siblings.change(f"group {change.group}", change)


async def _change_everywhere(siblings: Siblings, change: AdapterChange) -> None:
    await siblings.change(change.name, change)


def _build_dashboard(
    parts: GatewayParts, recent: RecentOutcomes, status: StatusEndpoints, loop_lag: LoopLag
) -> DashboardApi:
    return DashboardApi(
        DashboardSources(
            recent=recent,
            classes=parts.slo.classes.settings,
            read_stats=status.stats,
            clock=parts.clock,
            wall_clock=parts.wall_clock,
            loop_lag_s=loop_lag.quantile_s,
            stages_s=parts.metrics.stages.quantiles_s,
            read_experiments=partial(experiment_documents, parts.experiments),
            read_replicas=None if status.fleet is None else status.fleet.states,
            siblings=parts.siblings,
            prompt_heads=parts.prompt_heads,
        )
    )


def _build_lifespan(
    parts: GatewayParts,
    jobs: JobBuilder,
    adapters: AdapterRegistry,
    dashboard: DashboardApi,
    loop_lag: LoopLag,
    status: StatusEndpoints,
    prompts: NamedPrompts,
) -> Lifespan:
    settings = parts.adapters
    watcher = None
    if settings.folder is not None:
        watcher = AdapterWatcher(adapters, settings.folder, poll_s=settings.poll_s)
    return Lifespan(
        engine=parts.engine,
        jobs=jobs,
        upstream=parts.upstream,
        tenancy=parts.tenancy,
        experiments=parts.experiments,
        dashboard=dashboard,
        capture=parts.capture,
        tracer=parts.tracer,
        push=parts.push,
        read_metrics=status.families,
        loop_lag=loop_lag,
        cache=parts.cache.store,
        checks=parts.checks,
        responses=parts.responses,
        checks_pair=parts.routing.pair is not None,
        adapter_watcher=watcher,
        prompts=prompts,
        alerts=build_alerts(parts, status.fleet),
    )
