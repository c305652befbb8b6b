"""The part of the wiring for models on demand: `[tiers.NAME.on_demand]` in, their pool out."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from outrider.gateway.settings.adapters import AdapterSettings
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.on_demand import OnDemandSettings
from outrider.gateway.settings.public_models import fetch_advice, public_path
from outrider.gateway.settings.sections import NONE, ModelSettings, ServerSettings
from outrider.gateway.settings.telemetry import TelemetrySettings
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import Settings, is_missing_folder
from outrider.gateway.storage.urls import NO_DATABASE
from outrider.gateway.upstream.on_demand.model import ModelNeeds
from outrider.gateway.upstream.on_demand.pool import ModelPool
from outrider.gateway.upstream.on_demand.process import ProcessRecipe
from outrider.gateway.wiring.hardware import available_memory_bytes, may_have_gpu
from outrider.gateway.wiring.start import engine_environment

_GIB: Final = 2**30
_PROCESS_BYTES: Final = 3 * _GIB // 4
"""The engine's process with torch, and the gateway's beside it."""
_OVER_FILES: Final = 1.1
_WEIGHT_FILES: Final = ("*.safetensors", "*.gguf", "*.bin")
_DRAIN_S: Final = 5.0


def build_pool(settings: Settings) -> ModelPool | None:
    """Return the pool of the models on demand, empty; None where there are none."""
    if not settings.models_on_demand:
        return None
    return ModelPool(settings=settings.on_demand, free_bytes=available_memory_bytes)


def needs_of(settings: Settings, name: str, model: OnDemandSettings) -> ModelNeeds:
    """Return what a tier's model takes, and what its process is started with."""
    child = _settings_of(settings, name, settings.tiers[name], model)
    return ModelNeeds(
        recipe=ProcessRecipe(
            settings=child.model_dump_json(),
            key=secrets.token_urlsafe(32),
            # The process reads text from clients, so it gets no keys of other servers.
            environment=engine_environment(
                settings.model_copy(update={"engine": child.engine}), os.environ
            ),
        ),
        memory_bytes=_memory_bytes(model) or 0,
        keep_alive_s=None if model.keep_alive_s == "forever" else model.keep_alive_s,
    )


def on_demand_complaints(settings: Settings) -> Iterator[str]:
    """Yield what keeps models on demand from being loaded, a line for each."""
    if not settings.models_on_demand:
        return
    most_gib = settings.on_demand.memory_gib
    for name, model in settings.models_on_demand.items():
        where, needed = f"tiers.{name}.on_demand", _memory_bytes(model)
        if is_missing_folder(place := public_path(model.checkpoint or "")):
            advice = fetch_advice(place) or "no such folder or file"
            yield f"{where}.checkpoint = {model.checkpoint!r}: {advice}"
        elif needed is None:
            yield (
                f"{where}.memory_gib is missing: {model.checkpoint!r} is no folder or file here, "
                "so its size is not known"
            )
        elif most_gib and needed > most_gib * _GIB:
            yield (
                f"{where}: it takes about {needed / _GIB:.3g} GiB (set memory_gib if that is "
                f"wrong), more than on_demand.memory_gib, {most_gib:g}"
            )
        try:
            _settings_of(settings, name, settings.tiers[name], model)
        except ValidationError as error:
            yield f"{where}: {'; '.join(detail['msg'] for detail in error.errors())}"
    if settings.server.workers > 1:
        yield "server.workers: models on demand belong to one process; use 1"
    if most_gib is None and _is_on_gpu(settings):
        yield (
            "on_demand.memory_gib is missing: name the GPU's memory for models on demand, which "
            "only their engines can see"
        )


def _is_on_gpu(settings: Settings) -> bool:
    device = settings.engine.device
    return device == "cuda" or (device == "auto" and may_have_gpu())


def _memory_bytes(model: OnDemandSettings) -> int | None:
    """Return what a model takes; None where nothing is known of it."""
    if model.memory_gib is not None:
        return round(model.memory_gib * _GIB)
    weights = _file_bytes(Path(public_path(model.checkpoint or "")).expanduser())
    if not weights:
        return None
    return round(weights * _OVER_FILES + model.kv_cache_gib * _GIB) + _PROCESS_BYTES


def _file_bytes(place: Path) -> int:
    """Return the size of a checkpoint's weights; 0 where none are there."""
    if place.is_file():
        return place.stat().st_size
    for pattern in _WEIGHT_FILES:
        if files := [*place.glob(pattern)]:
            return sum(file.stat().st_size for file in files)
    return 0


def _settings_of(
    settings: Settings, name: str, tier: UpstreamSettings, model: OnDemandSettings
) -> Settings:
    """Return the settings of a model's process: a gateway with this model, which has our name."""
    engine = settings.engine
    return Settings(
        server=ServerSettings(drain_timeout_s=_DRAIN_S),
        models=ModelSettings(
            large=model.checkpoint,
            small=NONE,
            large_revision=model.revision,
            quantize=model.quantize,
        ),
        adapters=AdapterSettings(lora=model.lora),
        engine=engine.model_copy(
            update={
                "replicas": (),
                "kv_events": None,
                "kv_events_replay": None,
                "kv_folder": None,
                "role": "both",
                "process": True,
                "tensor_parallel": 1,
                "num_blocks": None,
                "dtype": model.dtype,
                "kv_cache_gib": model.kv_cache_gib,
                "max_sequences": model.max_sequences,
                "max_context": tier.max_context,
                "num_threads": model.num_threads,
            }
        ),
        speculation=settings.speculation,
        limits=settings.limits,
        http=settings.http,
        aliases={name: AliasSettings(models=("large",))},
        database_url=NO_DATABASE,
        log_level=settings.log_level,
        telemetry=TelemetrySettings(log_format=settings.telemetry.log_format),
    )
