"""Joins a gateway's parts into the HTTP application."""

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry

from outrider.gateway.answering.candidates.arm_check import arm_check
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.local_candidate import LocalParts
from outrider.gateway.answering.candidates.local_responder import LocalLoad
from outrider.gateway.answering.candidates.pass_through import PassThrough
from outrider.gateway.answering.candidates.planner import Planner
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCalls
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.tier_choice import TierChooser
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.local_models import LocalModels
from outrider.gateway.answering.reading.model_catalog import LocalFormats
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.answering.reading.tier_checks import TierChecks
from outrider.gateway.engines.adapters.admin import AdapterApi
from outrider.gateway.engines.adapters.registry import AdapterChange, AdapterRegistry
from outrider.gateway.engines.adapters.watcher import AdapterWatcher
from outrider.gateway.engines.backends.pause_metrics import PauseMetrics
from outrider.gateway.engines.fleet.admin import GroupChange, ReplicaApi
from outrider.gateway.engines.fleet.fleet_metrics import FleetMetrics
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.experiments.admin import ExperimentApi
from outrider.gateway.experiments.feedback import FeedbackApi
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.ollama.api import OllamaChat, OllamaGenerate, OllamaParts
from outrider.gateway.http.apis.ollama.endpoints import OllamaEndpoints, meant_name
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.responses.endpoints import StoredEndpoints
from outrider.gateway.http.apis.tokenize import Tokenizing
from outrider.gateway.http.dashboard.api import DashboardApi, DashboardSources
from outrider.gateway.http.dashboard.experiments import experiment_documents
from outrider.gateway.http.dashboard.recent import RecentOutcomes
from outrider.gateway.http.edge.bodies import BodyBudget
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.http.edge.idempotency import IdempotentAnswers
from outrider.gateway.http.server.app import Routes, create_app
from outrider.gateway.http.server.auth_dispatcher import AuthDispatcher
from outrider.gateway.http.server.endpoints import AnswerEndpoints, RequestIntake
from outrider.gateway.http.server.lifespan import Lifespan
from outrider.gateway.http.server.pages import Pages
from outrider.gateway.http.server.pass_through_endpoints import PassThroughEndpoints
from outrider.gateway.http.server.route_metrics import RouteCollector
from outrider.gateway.http.server.status import StatusEndpoints
from outrider.gateway.settings.adapters import parse_adapter
from outrider.gateway.settings.tiers import RESERVED_NAMES
from outrider.gateway.telemetry.loop_lag import LoopLag
from outrider.gateway.tenancy.keys.admin import AdminApi
from outrider.gateway.tenancy.ledger.usage_api import UsageApi
from outrider.gateway.wiring.caching import answer_cache
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.responses import conversations
from outrider.gateway.workers.line import Handler
from outrider.gateway.workers.merging import Families, collected
from outrider.gateway.workers.siblings import Siblings
from outrider.verifier.params import Tier


def build_app(parts: GatewayParts) -> AuthDispatcher:
    """Build the application without starting it."""
    if parts.routing.guard is not None:
        parts.metrics.registry.register(RouteCollector(parts.routing.guard))
    adapters = build_adapters(parts)
    jobs = build_jobs(parts, adapters)
    chains = ChainBook(aliases=parts.aliases)
    catalog = LiveModelCatalog(
        parts.upstream, jobs.models, _local_formats(parts), chains.first_models()
    )
    planner = _build_planner(parts, jobs, catalog, chains)
    recent = RecentOutcomes(clock=parts.clock)
    intake = _build_intake(parts, recent)
    status = StatusEndpoints(
        engine=parts.engine,
        jobs=jobs,
        catalog=catalog,
        chains=chains,
        upstream=parts.upstream,
        tenancy=parts.tenancy,
        metrics=parts.metrics,
        fleet=jobs.models.fleet,
        siblings=parts.siblings,
    )
    parts.metrics.registry.register(PauseMetrics(parts.engine))
    if status.fleet is not None:
        parts.metrics.registry.register(FleetMetrics(status.fleet))
    loop_lag = LoopLag(parts.metrics.registry)
    dashboard = _build_dashboard(parts, recent, status, loop_lag)
    keys = parts.tenancy.keys
    usage = UsageApi(parts.tenancy.database, parts.tenancy.ledger, siblings=parts.siblings)
    upstream_tiers = tuple(parts.upstream.tiers)
    admin = AdminApi(
        keys,
        intake.read_small_body,
        siblings=parts.siblings,
        upstream_tiers=upstream_tiers,
    )
    experiments = ExperimentApi(
        keys.authenticator,
        parts.experiments,
        intake.read_small_body,
        arm_check(planner, parts.clock),
        parts.siblings,
    )
    replicas = ReplicaApi(
        keys.authenticator,
        status.fleet,
        intake.read_small_body,
        None if parts.siblings is None else partial(_hold_everywhere, parts.siblings),
    )
    if parts.siblings is not None:
        _serve_siblings(
            parts.siblings,
            parts.metrics.registry,
            {
                "dashboard": dashboard.figures_here,
                "flush_ledger": usage.flush,
                "read_keys": admin.look_again,
                "read_experiments": experiments.read_again,
                "find_request": parts.experiments.feedback.find_here,
            },
        )
        parts.siblings.on_change(partial(_apply, adapters, replicas))
        parts.experiments.feedback.siblings = parts.siblings
    return create_app(
        Routes(
            answers=_build_answers(parts, intake, planner, jobs, chains, catalog),
            ollama=OllamaEndpoints(
                cards=status,
                catalog=catalog,
                read_body=intake.read_small_body,
                ignores_unknown=parts.unknown_fields == "ignore",
            ),
            status=status,
            pages=Pages(),
            dashboard=dashboard,
            usage=usage,
            admin=admin,
            adapters=AdapterApi(
                keys.authenticator,
                adapters,
                intake.read_small_body,
                None if parts.siblings is None else partial(_change_everywhere, parts.siblings),
            ),
            replicas=replicas,
            experiments=experiments,
            feedback=FeedbackApi(parts.experiments.feedback),
            intake=intake,
            lifespan=_build_lifespan(parts, jobs, adapters, dashboard, loop_lag, status),
            authenticate=keys.authenticator.authenticate,
            foreign_pages=ForeignPages.of(parts.http),
            has_open_metrics=keys.has_open_metrics,
            upstream_tiers=upstream_tiers,
            stored=StoredEndpoints(conversations=conversations(parts)),
            passing=PassThroughEndpoints(
                intake=intake,
                passing=PassThrough(upstream=parts.upstream, names=catalog, chains=chains),
            ),
        )
    )


def _serve_siblings(
    siblings: Siblings, registry: CollectorRegistry, handlers: Mapping[str, Handler]
) -> None:
    """Do for the gateway's other processes what they ask for."""

    async def snapshot(_: object) -> Families:
        return collected(registry)

    siblings.on("snapshot", snapshot)
    for name, handler in handlers.items():
        siblings.on(name, handler)


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


def _local_formats(parts: GatewayParts) -> dict[Tier, LocalFormats]:
    return {
        tier: LocalFormats(tool_format=tokenizer.dialect.format.name, may_think=tokenizer.may_think)
        for tier, tokenizer in parts.tokenizers.items()
    }


def build_adapters(parts: GatewayParts) -> AdapterRegistry:
    """Build the register of adapters, with those of the settings."""
    return AdapterRegistry(
        parts.engine,
        max_named=parts.adapters.max_named,
        taken=frozenset({*RESERVED_NAMES, *parts.upstream.tiers, *parts.aliases}),
        initial=[parse_adapter(each) for each in parts.adapters.lora],
    )


def build_jobs(parts: GatewayParts, adapters: AdapterRegistry | None = None) -> JobBuilder:
    """Build the builder of the engine's jobs."""
    models = LocalModels(
        engine=parts.engine,
        loaded=parts.tokenizers.keys(),
        adapters=adapters or build_adapters(parts),
        pair=parts.routing.pair,
        fleet=parts.engine if isinstance(parts.engine, EnginePool) else None,
    )
    return JobBuilder(
        models=models,
        tokenizers=parts.tokenizers,
        chooser=TierChooser(
            tokenizers=parts.tokenizers,
            router=parts.router,
            routing=parts.routing,
            limits=parts.limits,
            clock=parts.clock,
            on_routed=partial(parts.metrics.stages.observe, "route"),
        ),
        routing=parts.routing,
        limits=parts.limits,
        sampling_defaults=parts.sampling_defaults,
        classes=parts.slo.classes,
        metrics=parts.metrics,
        clock=parts.clock,
        prompt_slots=parts.prompt_slots,
    )


def build_tokenizing(parts: GatewayParts, jobs: JobBuilder, chains: ChainBook) -> Tokenizing:
    """Build the endpoints that need a tokenizer only."""
    ignores_unknown = parts.unknown_fields == "ignore"
    return Tokenizing(
        jobs=jobs,
        upstream=parts.upstream,
        tokenizers=parts.tokenizers,
        chains=chains,
        messages_api=MessagesApi(has_upstream_tiers=False, ignores_unknown=ignores_unknown),
        responses_api=ResponsesApi(
            has_upstream_tiers=False,
            ignores_unknown=ignores_unknown,
            conversations=conversations(parts),
        ),
        ignores_unknown=ignores_unknown,
    )


def _build_planner(
    parts: GatewayParts, jobs: JobBuilder, catalog: LiveModelCatalog, chains: ChainBook
) -> Planner:
    checks = TierChecks(
        upstream=parts.upstream,
        default_max_tokens=parts.limits.default_max_tokens,
        typical=parts.routing.typical,
    )
    calls = UpstreamCalls(
        upstreams=parts.upstream,
        names=catalog,
        checks=checks,
        routing=parts.routing,
        metrics=parts.metrics,
        local_tiers=tuple(parts.tokenizers),
        clock=parts.clock,
    )
    reader = RequestReader(
        upstreams=parts.upstream,
        names=catalog,
        checks=checks,
        experiments=parts.experiments,
        classes=parts.slo.classes,
        local_tiers=tuple(parts.tokenizers),
        ignores_unknown=parts.unknown_fields == "ignore",
    )
    return Planner(
        local=LocalParts(jobs=jobs, load=LocalLoad(parts.clock), calls=calls),
        calls=calls,
        router=parts.router,
        reader=reader,
        chains=chains,
    )


def _build_intake(parts: GatewayParts, recent: RecentOutcomes) -> RequestIntake:
    return RequestIntake(
        tenancy=parts.tenancy,
        limits=parts.limits,
        bodies=BodyBudget(
            max_bytes=parts.http.max_bytes_in_flight,
            max_bytes_per_owner=parts.http.max_bytes_in_flight_per_key,
            metrics=parts.edge_metrics,
        ),
        sinks=(*parts.experiments.sinks, parts.slo.goodput, recent),
        tracer=parts.tracer,
        capture=parts.capture,
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )


def _build_answers(
    parts: GatewayParts,
    intake: RequestIntake,
    planner: Planner,
    jobs: JobBuilder,
    chains: ChainBook,
    catalog: LiveModelCatalog,
) -> AnswerEndpoints:
    has_tiers = bool(parts.upstream.tiers)
    ignores_unknown = parts.unknown_fields == "ignore"
    idempotent = IdempotentAnswers.of(
        parts.http, parts.clock, parts.edge_metrics, elsewhere=parts.siblings
    )
    ollama = OllamaParts(
        meant_name=partial(meant_name, catalog),
        has_upstream_tiers=has_tiers,
        ignores_unknown=ignores_unknown,
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )
    if parts.siblings is not None:
        parts.siblings.on("kept_answer", idempotent.kept_answer)
    return AnswerEndpoints(
        intake=intake,
        planner=planner,
        tokenizing=build_tokenizing(parts, jobs, chains),
        idempotent=idempotent,
        cache=answer_cache(parts, jobs),
        responses_api=ResponsesApi(
            has_upstream_tiers=has_tiers,
            ignores_unknown=ignores_unknown,
            conversations=conversations(parts),
            clock=parts.wall_clock,
        ),
        messages_api=MessagesApi(has_upstream_tiers=has_tiers, ignores_unknown=ignores_unknown),
        ollama_api=OllamaChat(parts=ollama),
        ollama_generate_api=OllamaGenerate(parts=ollama),
        clock=parts.clock,
    )


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
        )
    )


def _build_lifespan(
    parts: GatewayParts,
    jobs: JobBuilder,
    adapters: AdapterRegistry,
    dashboard: DashboardApi,
    loop_lag: LoopLag,
    status: StatusEndpoints,
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
        responses=parts.responses,
        checks_pair=parts.routing.pair is not None,
        adapter_watcher=watcher,
    )
