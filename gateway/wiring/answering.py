"""Joins what answers requests: jobs, planner, and the endpoints of every API."""

from functools import partial

from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.local_candidate import LocalParts
from outrider.gateway.answering.candidates.planner import Planner
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCalls
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.tier_choice import TierChooser
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.local_load import LocalLoad, TierLoads
from outrider.gateway.answering.reading.local_models import LocalModels
from outrider.gateway.answering.reading.model_catalog import LocalFormats
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.answering.reading.tier_checks import TierChecks
from outrider.gateway.engines.adapters.registry import AdapterRegistry
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.http.apis.infill.api import InfillApi
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.ollama.api import OllamaChat, OllamaGenerate, OllamaParts
from outrider.gateway.http.apis.ollama.endpoints import meant_name
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.tokenize import Tokenizing
from outrider.gateway.http.apis.verify.api import VerifyApi
from outrider.gateway.http.dashboard.recent import RecentOutcomes
from outrider.gateway.http.edge.bodies import BodyBudget
from outrider.gateway.http.edge.idempotency import IdempotentAnswers
from outrider.gateway.http.server.endpoints import AnswerEndpoints, RequestIntake
from outrider.gateway.settings.adapters import parse_adapter
from outrider.gateway.settings.tiers import RESERVED_NAMES
from outrider.gateway.wiring.caching import answer_cache
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.responses import conversations


def build_adapters(parts: GatewayParts) -> AdapterRegistry:
    """Build the register of adapters, with those of the settings."""
    return AdapterRegistry(
        parts.engine,
        max_named=parts.adapters.max_named,
        taken=frozenset({*RESERVED_NAMES, *parts.upstream.tiers, *parts.aliases}),
        initial=[parse_adapter(each) for each in parts.adapters.lora],
    )


def build_jobs(
    parts: GatewayParts,
    adapters: AdapterRegistry | None = None,
    load: LocalLoad | None = None,
) -> JobBuilder:
    """Build the builder of the engine's jobs. `load`: the engine's, to compare with servers'."""
    load = load or LocalLoad(parts.clock)
    models = LocalModels(
        engine=parts.engine,
        loaded=parts.tokenizers.keys(),
        adapters=adapters or build_adapters(parts),
        pair=parts.routing.pair,
        assured=parts.routing.assured,
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
            loads=TierLoads(parts.clock, max_factor=parts.routing.max_busy_factor),
            first_token_s=lambda: load.expected(1).first_token_s,
            on_routed=partial(parts.metrics.stages.observe, "route"),
        ),
        routing=parts.routing,
        limits=parts.limits,
        sampling_defaults=parts.sampling_defaults,
        prompt_heads=parts.prompt_heads,
        reasoning_field=parts.reasoning_field,
        keys=parts.signing_keys,
        classes=parts.slo.classes,
        metrics=parts.metrics,
        clock=parts.clock,
        prompt_slots=parts.prompt_slots,
    )


def build_catalog(parts: GatewayParts, jobs: JobBuilder, chains: ChainBook) -> LiveModelCatalog:
    """Build the list of the models that requests may name."""
    formats = {
        tier: LocalFormats(tool_format=tokenizer.dialect.format.name, may_think=tokenizer.may_think)
        for tier, tokenizer in parts.tokenizers.items()
    }
    return LiveModelCatalog(parts.upstream, jobs.models, formats, chains.first_models())


def build_planner(
    parts: GatewayParts,
    jobs: JobBuilder,
    catalog: LiveModelCatalog,
    chains: ChainBook,
    load: LocalLoad | None = None,
) -> Planner:
    """Build what lines up the candidates of a request."""
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
        fills_in=any(each.infilling for each in parts.tokenizers.values()),
    )
    return Planner(
        local=LocalParts(jobs=jobs, load=load or LocalLoad(parts.clock), calls=calls),
        calls=calls,
        router=parts.router,
        reader=reader,
        chains=chains,
    )


def build_intake(parts: GatewayParts, recent: RecentOutcomes) -> RequestIntake:
    """Build what counts and reads requests."""
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


def build_answers(
    parts: GatewayParts,
    intake: RequestIntake,
    planner: Planner,
    jobs: JobBuilder,
    chains: ChainBook,
    catalog: LiveModelCatalog,
) -> AnswerEndpoints:
    """Build the endpoints that answer."""
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
        checks=parts.checks,
        responses_api=ResponsesApi(
            has_upstream_tiers=has_tiers,
            ignores_unknown=ignores_unknown,
            conversations=conversations(parts),
            clock=parts.wall_clock,
        ),
        messages_api=MessagesApi(has_upstream_tiers=has_tiers, ignores_unknown=ignores_unknown),
        ollama_api=OllamaChat(parts=ollama),
        ollama_generate_api=OllamaGenerate(parts=ollama),
        infill_api=InfillApi(
            has_upstream_tiers=has_tiers, ignores_unknown=ignores_unknown, clock=parts.clock
        ),
        verify_api=VerifyApi(
            jobs=jobs,
            keys=parts.signing_keys,
            wall_clock=parts.wall_clock,
            ignores_unknown=ignores_unknown,
        ),
        clock=parts.clock,
    )
