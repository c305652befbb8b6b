"""Steps of an engine's start before anything heavy is imported: checks, and its process."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outrider.engine.adapters.peft_config import check_kind
from outrider.engine.errors import InvalidAdapterError
from outrider.engine.model.checkpoint_check import ask_hub, check_checkpoint
from outrider.engine.model.checkpoint_files import read_object
from outrider.gateway.engines.backends.spawning import EngineProcess, EngineRecipe
from outrider.gateway.settings.adapters import parse_adapter
from outrider.gateway.settings.alerts import AlertSettings
from outrider.gateway.settings.caching import CacheSettings
from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.public_models import fetch_advice
from outrider.gateway.settings.responses import ResponseSettings
from outrider.gateway.settings.sign_in import SignInSettings
from outrider.gateway.settings.sources import ENV_PREFIX
from outrider.gateway.settings.tiers import HandoffSettings, MirrorSettings
from outrider.gateway.settings.tree import Settings, SettingsError, is_missing_folder
from outrider.gateway.tenancy.keys.loopback import listen_host
from outrider.gateway.wiring.chat_tokenizers import chat_template
from outrider.gateway.wiring.checkpoints import at_commits, named_models
from outrider.gateway.wiring.hardware import may_have_gpu, usable_physical_cores
from outrider.verifier.params import TIERS, Tier

_READ_BY_ENGINE: Final = {"OUTRIDER_CPU", "OUTRIDER_KERNELS"}
_OWN_DRAFTER: Final = "mtp"  # in the place of a path: see draft/heads/read_head.py


def openmp_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that a computing process needs before it loads torch.

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
    """Return the OpenMP variables of the engine's process, and None for each secret to remove.

    The engine reads text from clients, so it gets neither keys nor databases: `_engine_settings`
    leaves them out, and None removes their variables.
    """
    secrets = {tier.api_key_env for tier in settings.tiers.values()} - {None}
    secrets |= {name for name in environ if name.upper().startswith(ENV_PREFIX)} - _READ_BY_ENGINE
    return dict.fromkeys(filter(None, secrets)) | openmp_environment(settings)


def engine_recipe(settings: Settings) -> EngineRecipe:
    """Return the recipe for the engine's process."""
    return EngineRecipe(
        builder="outrider.gateway.wiring.build:build_engine_from_json",
        arguments=_engine_settings(settings).model_dump_json(),
        environment=engine_environment(settings, os.environ),
        log_level=settings.log_level,
        log_format=settings.telemetry.log_format,
        importer="outrider.gateway.wiring.build:import_engine"
        if settings.engine.reserve_process
        else None,
    )


def start_engine(settings: Settings) -> EngineProcess | None:
    """Start the engine's process at once; None where it is started later, or not at all.

    Raises SettingsError for a model that cannot be there.
    """
    check_models(settings)
    options = settings.engine
    has_process = settings.models.is_any and options.process and not options.replicas
    return EngineProcess(engine_recipe(settings)) if has_process and os.name == "posix" else None


def _engine_settings(settings: Settings) -> Settings:
    """Return the settings for the engine's process, without upstream tiers, keys and databases."""
    not_its_business = {
        "tiers": {},
        "aliases": {},
        "cache": CacheSettings(),
        "responses": ResponseSettings(),
        "handoff": HandoffSettings(),
        "mirror": MirrorSettings(),
        "keys": KeySettings(),
        "alerts": AlertSettings(),
        "checks": {},
        "sign_in": SignInSettings(),
        "database_url": None,
        "redis_url": None,
        "experiments": {},
    }
    return settings.model_copy(update={**not_its_business, "models": at_commits(settings)})


def keep_torch_out() -> None:
    """Make importing torch fail in this process from now on.

    transformers' tokenizers work without torch but import it when they find it, which costs the
    gateway seconds at start-up and some 250 MB. None in its place is Python's own mark of a module
    that cannot be imported.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def check_models(settings: Settings) -> None:
    """Raise SettingsError for a model, template or device that cannot be there, before any import.

    Raises MissingExtraError for packages that are not installed, and UnsupportedModelError for a
    model that is there and cannot be served.
    """
    check_extras(settings)
    is_here = settings.models.is_any and not settings.engine.replicas
    if settings.engine.device == "cuda" and is_here and not may_have_gpu():
        raise SettingsError(
            "engine.device is cuda, but this machine has no GPU driver. Use --device cpu, or "
            "install the driver; `outrider doctor` shows what is there."
        )
    named = named_models(settings)
    _check_templates(settings, named)
    check_folders(settings)
    models = settings.models
    for tier, path in named.items():
        chat_template(settings, tier)
        if is_here:  # of a model that runs elsewhere the tokenizer is enough
            revision = models.revision(tier)
            pinned = revision and models.resolved()[tier]  # its folder has no weights yet
            check_checkpoint(pinned or path, revision)
    if is_here:
        _check_drafter(settings, named)
        _check_adapters(settings)


def check_extras(settings: Settings) -> None:
    """Raise MissingExtraError for packages that the settings need and that are not there."""
    if settings.models.is_any and settings.engine.replicas:
        need_extra("tokenize", "Reading the tokenizers of an engine's models (--engines)")
    elif settings.models.is_any:
        need_extra(
            "engine",
            "A model on this machine (other servers alone: --large none --small none "
            "--tier NAME=URL)",
        )
    if settings.experiments:
        need_extra("experiments", "Evaluating experiments")


def check_folders(settings: Settings) -> None:
    """Raise SettingsError for a model that is named by a path where nothing is."""
    for tier, path in named_models(settings).items():
        if is_missing_folder(path):
            raise SettingsError(
                fetch_advice(path)
                or f"models.{tier} = {path!r}: no such folder or file. Name a folder with a "
                "checkpoint, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B."
            )


def _check_drafter(settings: Settings, named: Mapping[Tier, str]) -> None:
    """Raise SettingsError for a drafter that is not there, or has no large model to draft for."""
    path = settings.models.drafter
    if path is None or not settings.speculation.enabled:
        return
    if "large" not in named:
        raise SettingsError(
            f"models.drafter (--drafter) = {path!r} drafts for the large model, but there is none "
            "on this machine: name one with --large."
        )
    if path != _OWN_DRAFTER and is_missing_folder(path):
        raise SettingsError(
            f"models.drafter (--drafter) = {path!r}: no such folder. Name a folder with an "
            "EAGLE-3, MTP, P-EAGLE or DFlash drafter, a Hugging Face id, or mtp for the drafter in "
            "the large model's own checkpoint."
        )
    if settings.models.drafter_revision is not None:
        ask_hub(path, settings.models.drafter_revision)


def _check_adapters(settings: Settings) -> None:
    """Raise InvalidAdapterError for an adapter of a kind that is not run, such as DoRA."""
    for named in map(parse_adapter, settings.adapters.lora):
        folder = Path(named.folder).expanduser()
        if (config := read_object(folder / "adapter_config.json")) is not None:
            try:
                check_kind(dict(config))
            except InvalidAdapterError as error:
                raise InvalidAdapterError(f"--lora {named.name}={folder}: {error}") from None


def _check_templates(settings: Settings, named: Mapping[Tier, str]) -> None:
    """Raise SettingsError for a chat template of a tier that has no model here."""
    text = settings.models.chat_template
    for tier in TIERS:
        if tier not in named and re.search(rf"(^|,)\s*{tier}=", text):
            raise SettingsError(
                f"models.chat_template = {text!r} (--chat-template) names a template for the "
                f"{tier} tier, which has no model on this machine; templates of other servers are "
                f"theirs. Name a model with --{tier}, or leave {tier}=FILE out."
            )


def serving_host(settings: Settings) -> tuple[str, str | None]:
    """Return the address to listen on, this machine's own without keys, and a warning or None.

    Opens the database where that matters. Raises SettingsError.
    """
    is_known = settings.keys.mode != "auto" or settings.keys.api_key is not None
    if is_known or is_loopback(settings.server.host):
        return listen_host(settings, has_keys=False)
    # Most starts need no database to know their address, and it takes half a second to import.
    from outrider.gateway.storage.database import DatabaseError
    from outrider.gateway.storage.open import open_database
    from outrider.gateway.tenancy.keys.key_parts import key_store

    database = open_database(settings)
    if database is None:
        return listen_host(settings, has_keys=False)
    try:
        return listen_host(settings, key_store(settings, database).load().has_any)
    except DatabaseError as error:
        raise SettingsError(error.detail) from None
    finally:
        database.close()
