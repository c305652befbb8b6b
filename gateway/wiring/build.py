"""The only place that knows all parts: settings in, a wired engine or gateway out.

Everything heavy is imported inside functions: the gateway's process builds no engine and so loads
no torch of its own.
"""

import os
import random
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from engine.errors import EngineError
from engine.request import Tier
from gateway.backends.absent import AbsentEngine
from gateway.backends.in_process import InProcessEngineClient
from gateway.backends.process_client import ProcessEngineClient
from gateway.backends.step_loop import ProgressCallback, no_progress
from gateway.edge.json_bounds import JsonBounds
from gateway.settings.keys import KeySettings
from gateway.settings.tiers import HandoffSettings, MirrorSettings
from gateway.settings.tree import ENV_PREFIX, Settings, SettingsError, is_missing_folder
from gateway.wiring.engine import (
    allowed_difference,
    compile_kernels,
    join,
    load_runners,
    measure_budget,
    named_models,
)
from gateway.wiring.hardware import usable_physical_cores

if TYPE_CHECKING:
    from engine.core import Engine
    from gateway.planning.context import GatewayContext

_READ_BY_ENGINE: Final = {"OUTRIDER_KERNELS"}

EngineClient = InProcessEngineClient | ProcessEngineClient | AbsentEngine


def openmp_environment(settings: Settings) -> dict[str, str]:
    """Variables that a process which computes needs before it loads torch.

    OpenMP's threads spin for milliseconds at the end of every parallel piece of work by default.
    Beside another busy process (the gateway itself on a small machine) that takes the core from
    the very thread that is waited for: on 2 cores under load a 50 ms pass took 450 ms. Spinning
    for some 50 microseconds bridges the gaps inside a pass and gives the core up after it.
    libgomp reads GOMP_SPINCOUNT, LLVM's and Intel's runtimes KMP_BLOCKTIME (milliseconds).
    """
    num_threads = settings.engine.num_threads or usable_physical_cores()
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": "2000",
        "KMP_BLOCKTIME": "1",
    }


def engine_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The OpenMP variables of the engine's process, and None for each secret that it must not get.

    The engine reads what clients wrote, so it knows neither keys nor databases:
    `_engine_settings` leaves them out, and None removes their variables.
    """
    secrets = {tier.api_key_env for tier in settings.tiers.values()} - {None}
    secrets |= {name for name in environ if name.upper().startswith(ENV_PREFIX)} - _READ_BY_ENGINE
    return dict.fromkeys(filter(None, secrets)) | openmp_environment(settings)


def build_client(settings: Settings, on_progress: ProgressCallback = no_progress) -> EngineClient:
    """The engine as the settings want it: in its own process, in a thread of this one, or none."""
    if not settings.models.is_any:
        return AbsentEngine()
    if not settings.engine.process:
        _import_lazy_parts()
        return InProcessEngineClient(
            lambda report: build_engine(settings, report), on_progress=on_progress
        )
    return ProcessEngineClient(
        "gateway.wiring.build:build_engine_from_json",
        _engine_settings(settings).model_dump_json(),
        environment=engine_environment(settings, os.environ),
        on_progress=on_progress,
        stall_timeout_s=settings.engine.stall_timeout_s,
        unready_after_s=settings.engine.unready_after_s,
        log_level=settings.log_level,
        log_format=settings.telemetry.log_format,
    )


def _import_lazy_parts() -> None:
    """Have transformers load what the engine's thread and the tokenizers' both ask it for.

    Its modules load when they are first named; named by two threads at once, one of them may find
    half of one.
    """
    import transformers

    for name in ("AutoConfig", "AutoTokenizer", "GenerationConfig"):
        getattr(transformers, name)


def _engine_settings(settings: Settings) -> Settings:
    """What the engine's process needs to know: nothing of servers elsewhere, keys and databases."""
    not_its_business = {
        "tiers": {},
        "handoff": HandoffSettings(),
        "mirror": MirrorSettings(),
        "keys": KeySettings(),
        "database_url": None,
        "redis_url": None,
        "experiments": {},
    }
    return settings.model_copy(update=not_its_business)


def keep_torch_out() -> None:
    """Make importing torch fail in this process from now on.

    transformers' tokenizers work without torch but import it when they find it, which costs the
    gateway seconds at start-up and some 250 MB for nothing. Python's own way to say that a module
    is not to be had is None in its place.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def check_models(settings: Settings) -> None:
    """Raise SettingsError for a model that cannot be there, before anything is loaded."""
    for tier, path in named_models(settings).items():
        if is_missing_folder(path):
            raise SettingsError(
                f"models.{tier} = {path!r}: there is no such folder. Name one with a checkpoint, "
                "or a Hugging Face id such as Qwen/Qwen3-0.6B."
            )


def build_context(settings: Settings, engine: EngineClient) -> "GatewayContext":
    """What the HTTP application needs besides the engine: tokenizers, router, tiers elsewhere.

    Raises EngineError for a tokenizer or a router that cannot be used, and for a drafter whose
    tokenizer is another than the large model's; SettingsError for tiers that cannot work.
    """
    from gateway.edge.metrics import EdgeMetrics
    from gateway.experiments.experiments import build_experiments
    from gateway.metering.metrics import GatewayMetrics
    from gateway.planning.context import GatewayContext, GatewayLimits
    from gateway.slo.parts import build_slo
    from gateway.telemetry.capture import build_capture
    from gateway.telemetry.tracing import build_tracer
    from gateway.text.chat import ChatTokenizer
    from gateway.wiring.routing import build_routing
    from gateway.wiring.tenancy import build_tenancy
    from gateway.wiring.upstream import build_cloud

    models = named_models(settings)
    metrics = GatewayMetrics()
    tenancy = build_tenancy(settings, metrics.registry)
    cloud = build_cloud(settings, os.environ, tuple(models), metrics.upstream)

    wanted = settings.models.tool_format
    tool_format = None if wanted == "auto" else wanted
    tokenizers: dict[Tier, ChatTokenizer] = {}
    for tier, path in models.items():
        try:
            tokenizers[tier] = ChatTokenizer.load(path, tool_format)
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    if len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) > 1:
        allowed_difference(settings)  # long before the engine has loaded its weights
    router, routing = build_routing(
        settings, models, has_strong_elsewhere=cloud.rules.strong == "cloud"
    )
    return GatewayContext(
        engine=engine,
        tokenizers=tokenizers,
        router=router,
        routing=routing,
        cloud=cloud,
        metrics=metrics,
        tenancy=tenancy,
        http=settings.http,
        edge_metrics=EdgeMetrics(metrics.registry),
        experiments=build_experiments(settings.experiments, tenancy.database, metrics.registry),
        slo=build_slo(settings.slo, metrics.registry),
        tracer=build_tracer(
            settings.telemetry.traces,
            metrics.registry,
            clock=time.monotonic,
            wall_clock=time.time,
            rng=random.Random(),
        ),
        capture=build_capture(
            settings.telemetry.capture,
            metrics.registry,
            rng=random.Random(),
            wall_clock=time.time,
        ),
        limits=GatewayLimits(
            default_max_tokens=settings.limits.default_max_tokens,
            max_body_bytes=settings.limits.max_body_bytes,
            max_prompt_chars=settings.limits.max_prompt_chars,
            json_bounds=JsonBounds(
                max_values=settings.limits.max_json_values,
                max_objects=settings.limits.max_json_objects,
                max_fields=settings.limits.max_json_fields,
                max_strings=settings.limits.max_json_strings,
                max_nesting=settings.limits.max_json_nesting,
            ),
        ),
    )


def build_engine_from_json(settings_json: str, on_progress: ProgressCallback) -> "Engine":
    """`build_engine` as the engine's process calls it."""
    engine = build_engine(Settings.model_validate_json(settings_json), on_progress)
    engine.warm_up_grammars()
    return engine


def build_engine(settings: Settings, on_progress: ProgressCallback) -> "Engine":
    """Load the models and join runners, drafter and verifier. Raises EngineError."""
    runners = load_runners(settings, on_progress)
    compile_kernels(settings, runners, on_progress)  # before passes are timed
    return join(settings, runners, measure_budget(settings, runners, on_progress))
