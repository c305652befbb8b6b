"""Builds from the settings: an engine, its client, and the parts of a gateway.

Everything heavy is imported inside functions: the gateway's process builds no engine and so loads
no torch of its own.
"""

import importlib
import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from outrider.engine.errors import EngineError
from outrider.engine.request import GrammarSpec
from outrider.gateway.engines.backends.absent import AbsentEngine
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineProcess
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.chat_tokenizers import checkpoint_defaults, load_chat_tokenizer
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.drafter import allowed_difference, measure_budget
from outrider.gateway.wiring.engine import (
    build_grammars,
    compile_kernels,
    join,
    load_adapters,
    load_runners,
    publish_blocks,
    saved_times,
)
from outrider.gateway.wiring.fleet import RemoteEngines, build_remote
from outrider.gateway.wiring.kv_folder import open_folder, open_store
from outrider.gateway.wiring.process import process_client
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.engine.cache.peers import Peers
    from outrider.engine.core import Engine
    from outrider.engine.passes.saved_times import SavedTimes
    from outrider.gateway.answering.text.chat import ChatTokenizer
    from outrider.gateway.telemetry.capture import Capture
    from outrider.gateway.telemetry.otlp_metrics import MetricsPush
    from outrider.gateway.telemetry.tracer import Tracer
    from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
    from outrider.gateway.wiring.gateway_parts import GatewayParts
    from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

AnyEngineClient = InProcessEngineClient | ProcessEngineClient | RemoteEngines | AbsentEngine


def build_client(
    settings: Settings,
    on_progress: LoadingCallback = no_progress,
    first: EngineProcess | None = None,
    tokenizers: "Future[Mapping[Tier, str]] | None" = None,
) -> AnyEngineClient:
    """Build the engine as configured: in its own process, in this one, elsewhere, or none.

    `first`: the engine's process, where it was started before (`start_engine`). `tokenizers`:
    fingerprints, which engines elsewhere must have too.
    """
    if not settings.models.is_any:
        return AbsentEngine()
    if settings.engine.replicas:
        return build_remote(settings, tokenizers)
    if not settings.engine.process:
        _import_lazy_parts()
        return InProcessEngineClient(
            lambda report: build_engine(settings, report), on_progress=on_progress
        )
    return process_client(settings, on_progress, first)


def _import_lazy_parts() -> None:
    """Have transformers load the modules that the engine's and the tokenizers' threads both need.

    Its modules load when they are first named; if two threads name one at once, one of them may
    find it half loaded.
    """
    import transformers

    for name in ("AutoConfig", "AutoTokenizer", "GenerationConfig"):
        getattr(transformers, name)


def build_parts(
    settings: Settings,
    engine: AnyEngineClient,
    on_tokenizers: Callable[[Mapping[Tier, str]], None] = lambda fingerprints: None,
    siblings: "Siblings | None" = None,
) -> "GatewayParts":
    """Build the HTTP application's parts except the engine: tokenizers, router, upstreams.

    `on_tokenizers`: told their fingerprints, by tier. `siblings`: the gateway's other processes.

    Raises EngineError for a tokenizer or a router that cannot be used, and for a drafter whose
    tokenizer is another than the large model's; SettingsError for tiers that cannot work.
    """
    from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
    from outrider.gateway.experiments.experiments import build_experiments
    from outrider.gateway.experiments.slo.slo_parts import build_slo
    from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
    from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
    from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
    from outrider.gateway.wiring.aliases import alias_policies, checked_aliases
    from outrider.gateway.wiring.batches import build_batch_store
    from outrider.gateway.wiring.caching import build_cache
    from outrider.gateway.wiring.checks import build_checks
    from outrider.gateway.wiring.gateway_parts import GatewayParts
    from outrider.gateway.wiring.receipts import signing_keys
    from outrider.gateway.wiring.responses import build_response_store
    from outrider.gateway.wiring.routing import build_routing
    from outrider.gateway.wiring.tenancy import build_tenancy
    from outrider.gateway.wiring.upstream import build_upstream

    models = named_models(settings)
    metrics = GatewayMetrics()
    tenancy = build_tenancy(settings, metrics.registry)
    upstream = build_upstream(
        settings, os.environ, tuple(models), UpstreamMetrics(metrics.registry)
    )

    tokenizers = _load_tokenizers(settings, models)
    if len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) > 1:
        allowed_difference(settings)  # long before the engine has loaded its weights
    on_tokenizers({tier: tokenizer.fingerprint for tier, tokenizer in tokenizers.items()})
    router, routing = build_routing(
        settings,
        models,
        has_upstream_strong=upstream.rules.strong_place == "upstream",
        has_small_server=upstream.rules.small is not None,
    )
    tracer, capture = _build_tracing(settings, metrics)
    return GatewayParts(
        engine=engine,
        siblings=siblings,
        tokenizers=tokenizers,
        sampling_defaults=checkpoint_defaults(settings, models),
        router=router,
        routing=routing,
        upstream=upstream,
        adapters=settings.adapters,
        alerts=settings.alerts,
        aliases=checked_aliases(settings),
        alias_policies=alias_policies(settings),
        unknown_fields=settings.unknown_fields,
        reasoning_field=settings.reasoning_field,
        cache=build_cache(settings),
        checks=build_checks(settings, metrics.registry),
        signing_keys=signing_keys(settings.receipts),
        responses=build_response_store(settings),
        batches=build_batch_store(settings, tenancy.database),
        sign_in=settings.sign_in,
        metrics=metrics,
        tenancy=tenancy,
        http=settings.http,
        edge_metrics=EdgeMetrics(metrics.registry),
        experiments=build_experiments(settings.experiments, tenancy.database, metrics.registry),
        slo=build_slo(settings.slo, metrics.registry),
        tracer=tracer,
        push=_build_push(settings, siblings),
        capture=capture,
        limits=GatewayLimits.of(settings.limits),
    )


def _load_tokenizers(settings: Settings, models: Mapping[Tier, str]) -> "dict[Tier, ChatTokenizer]":
    """Load the tokenizer of each model to load (tier to path). Raises EngineError."""
    tokenizers = {}
    for tier, path in models.items():
        try:
            tokenizers[tier] = load_chat_tokenizer(settings, tier, path)
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: the tokenizer cannot be loaded: {error}") from error
        tokenizers[tier].compile_template()
        if not tokenizers[tier].has_template:
            logger.warning(
                "the %s model has no chat template, so only /v1/completions can use it "
                "model=%s advice=name one with --chat-template FILE",
                tier,
                path,
            )
    return tokenizers


def _build_tracing(settings: Settings, metrics: "GatewayMetrics") -> "tuple[Tracer, Capture]":
    """Build what keeps the traces of requests: spans for a collector, and the latest ones here."""
    from outrider.gateway.telemetry.capture import build_capture
    from outrider.gateway.telemetry.tracer import NULL_TRACER
    from outrider.gateway.telemetry.tracing import build_tracer, wants_content

    traces = settings.telemetry.traces
    tracer = build_tracer(
        traces, metrics.registry, environ=os.environ, clock=time.monotonic, wall_clock=time.time
    )
    capture = build_capture(
        settings.telemetry.capture,
        metrics.registry,
        rng=random.Random(),
        wall_clock=time.time,
        shows_texts=tracer is not NULL_TRACER and wants_content(traces, os.environ),
    )
    return tracer, capture


def _build_push(settings: Settings, siblings: "Siblings | None") -> "MetricsPush | None":
    """Build what sends the metrics of all workers, in the first one; None where none are wanted."""
    from outrider.gateway.telemetry.tracing import collector_url, is_sent, missing_extra

    endpoint = settings.telemetry.metrics.endpoint
    is_first = siblings is None or siblings.number == 1
    if not is_first or not is_sent("metrics", endpoint, os.environ):
        return None
    url = collector_url("metrics", endpoint)
    try:
        from outrider.gateway.telemetry.otlp_metrics import build_push
    except ModuleNotFoundError as error:
        missing_extra("metrics", endpoint, error)
        return None
    return build_push(url, settings.telemetry.traces.service_name, os.environ)


def import_engine() -> None:
    """Import what `build_engine` imports, in a process that waits in reserve."""
    for name in (
        "outrider.draft.budget.budget",
        "outrider.draft.saved_lessons",
        "outrider.draft.tree_drafter",
        "outrider.engine.core",
        "outrider.engine.grammar.llguidance_backend",
        "outrider.engine.model.load",
        "outrider.engine.passes.saved_times",
        "outrider.engine.passes.step_times",
        "outrider.engine.warm_up",
        "outrider.gateway.answering.text.plain_tokenizer",
        "outrider.gateway.wiring.chat_tokenizers",
        "outrider.gateway.answering.text.chat",
        "outrider.verifier.coupled",
        "llguidance",
    ):
        importlib.import_module(name)


def build_engine_from_json(settings_json: str, on_progress: LoadingCallback) -> "Engine":
    """Call `build_engine` with settings as JSON, in the engine's process."""
    settings = Settings.model_validate_json(settings_json)
    return build_engine(settings, on_progress, saved_times(settings), starts_compilers=True)


def build_engine(
    settings: Settings,
    on_progress: LoadingCallback,
    saved: "SavedTimes | None" = None,
    *,
    starts_compilers: bool = False,
    peers: "Peers | None" = None,
) -> "Engine":
    """Load the models and join runners, drafter and verifier. Raises EngineError.

    `saved`: pass times of earlier starts, and what drafting learnt; without it passes are measured.
    `starts_compilers`: of grammars, now and in the background, not at the first grammar. `peers`:
    lines to other engines.
    """
    folder = open_folder(settings)  # before models are loaded for nothing
    runners = load_runners(settings, on_progress)
    grammars = build_grammars(settings, runners)
    if starts_compilers:
        for compiler in grammars.values():
            compiler.compile(GrammarSpec(kind="json"))
    compile_kernels(settings, runners, on_progress)  # before passes are timed
    budget = measure_budget(settings, runners, on_progress, saved)
    store = open_store(folder, runners)
    engine = join(settings, runners, budget, grammars, store, peers, saved)
    if store is not None:
        weakref.finalize(engine, store.close)
    load_adapters(settings, engine)
    publish_blocks(settings, engine)
    engine.pins.restore(engine.submit)
    return engine
