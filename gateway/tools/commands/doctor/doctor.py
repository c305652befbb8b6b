"""`outrider doctor`: is this a place where Outrider can run, and what to do if it is not."""

import contextlib
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.gateway.http.server.listening import listen
from outrider.gateway.settings.extras import MissingExtraError
from outrider.gateway.settings.public_models import fetch_advice
from outrider.gateway.settings.tree import Settings, SettingsError, is_missing_folder
from outrider.gateway.tools.commands.doctor.findings import Finding, FindingStatus
from outrider.gateway.tools.commands.doctor.gpu_compiler import (
    check_compiler,
    check_kernel_cache,
    check_triton,
)
from outrider.gateway.tools.commands.doctor.gpu_device import check_device, gpu_state, is_gpu_wanted
from outrider.gateway.tools.commands.doctor.prices import check_prices
from outrider.gateway.tools.commands.doctor.ranks import find_ranks
from outrider.gateway.tools.commands.doctor.storage import STORAGE_CHECKS
from outrider.gateway.tools.commands.doctor.tested_versions import check_version
from outrider.gateway.wiring.hardware import available_memory_bytes, usable_physical_cores
from outrider.gateway.wiring.start import check_extras
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.engine.model.config import ModelConfig

_GIB = 2**30
# None from a check that does not matter here.
_Check = Callable[[], Finding | None]
_OVERHEAD_BYTES = 600 * 2**20  # both processes with their libraries


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield all checks, one by one as they are done. A check that raises is a failed check."""
    yield _python()
    checks: list[tuple[str, _Check]] = [("models", _no_models)]
    if settings.models.is_any:
        checks = [("packages", partial(_extras, settings)), *_local_checks(settings)]
    checks += [(f"{name} tier", partial(_tier, name, settings)) for name in settings.tiers]
    if settings.tiers:
        checks.append(("prices", partial(check_prices, settings)))
    checks += [(name, partial(check, settings)) for name, check in STORAGE_CHECKS.items()]
    checks.append(("port", lambda: _port(settings)))
    for name, check in checks:
        try:
            if (found := check()) is not None:
                yield found
        except Exception as error:  # noqa: BLE001 - a doctor reports, whatever it meets
            yield Finding(
                name=name,
                status="failed",
                detail=f"{type(error).__name__}: {error}",
                advice="Run `make test` to see more, or install into a new environment.",
            )


def _local_checks(settings: Settings) -> list[tuple[str, _Check]]:
    """Return the checks for a machine that runs a model."""
    gpu, device = functools.cache(gpu_state), settings.engine.device

    def if_gpu(check: Callable[[Mapping[str, str]], Finding]) -> Finding | None:
        return check(os.environ) if is_gpu_wanted(gpu(), device) else None

    checks: list[tuple[str, _Check]] = [
        ("torch", _torch),
        ("transformers", partial(check_version, "transformers")),
        ("device", lambda: check_device(gpu(), device, cpu=_vector_extension())),
        ("bfloat16", lambda: _bfloat16(settings)),
        ("products", lambda: _products(settings)),
        ("triton", lambda: check_triton(is_gpu_wanted=is_gpu_wanted(gpu(), device))),
        ("compiler", lambda: if_gpu(check_compiler)),
        ("kernel cache", lambda: if_gpu(check_kernel_cache)),
        ("threads", lambda: _threads(settings)),
    ]
    for tier, path in settings.models.resolved().items():
        if path is not None:
            checks.append((f"{tier} model", partial(_model, settings, tier, path)))
    on_gpu = partial(is_gpu_wanted, device=device)
    checks.append(("tensor parallel", lambda: find_ranks(settings, is_on_gpu=on_gpu(gpu()))))
    if all(path is not None for path in settings.models.resolved().values()):
        checks.append(("tokenizers", lambda: _tokenizers(settings)))
    checks.append(("memory", lambda: _memory(settings)))
    checks.append(("router", lambda: _router(settings)))
    return checks


def _extras(settings: Settings) -> Finding | None:
    """Say which extra is missing; the checks behind it fail then."""
    try:
        check_extras(settings)
    except MissingExtraError as error:
        detail, _, advice = str(error).rpartition(": ")
        return Finding(name="packages", status="failed", detail=detail, advice=f"Run {advice}")
    return None


def _no_models() -> Finding:
    detail = "no local models: upstream tiers answer everything"
    return Finding(name="models", status="ok", detail=detail)


def _python() -> Finding:
    # An older Python than ours does not get here: pip refuses to install.
    detail = f"{platform.python_version()} at {sys.executable}"
    return Finding(name="python", status="ok", detail=detail)


def _torch() -> Finding:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return check_version("torch", f", built for {built_for}")


def _vector_extension() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _bfloat16(settings: Settings) -> Finding:
    import torch

    from outrider.kernels.cpu.product_library import product_support

    if torch.cuda.is_available() and settings.engine.device != "cpu":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_native = _cpu_has_bfloat16()
    has_products = settings.engine.device != "cuda" and product_support().library is not None
    if has_products and not is_native:
        detail = "computed by the compiled products"
        return Finding(name="bfloat16", status="ok", detail=detail)
    if is_native or settings.engine.dtype in ("float32", "float16"):
        detail = "computed natively" if is_native else "not native, not used"
        return Finding(name="bfloat16", status="ok", detail=detail)
    return Finding(
        name="bfloat16",
        status="warning",
        detail="this processor has no bfloat16 arithmetic: bfloat16 models run slowly",
        advice="Use --dtype float32 if there is memory for it.",
    )


def _cpu_has_bfloat16() -> bool:
    """AMX, AVX512-BF16 or Arm's BF16, as the operating system lists them."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def _products(settings: Settings) -> Finding:
    """Name the library whose matrix products a CPU runs."""
    import torch

    from outrider.kernels.cpu.product_library import product_support

    if torch.cuda.is_available() and settings.engine.device != "cpu":
        return Finding(name="products", status="ok", detail="the GPU's")
    support = product_support()
    status: FindingStatus = "warning" if support.advice else "ok"
    return Finding(name="products", status=status, detail=support.detail, advice=support.advice)


def _threads(settings: Settings) -> Finding:
    cores = usable_physical_cores()
    num_threads = settings.engine.num_threads
    wanted = "as many as the models' size is worth" if num_threads is None else str(num_threads)
    detail = f"{wanted}; {cores} physical cores to use"
    if num_threads is None or num_threads <= cores:
        return Finding(name="threads", status="ok", detail=detail)
    return Finding(
        name="threads",
        status="warning",
        detail=detail,
        advice=f"More threads than cores wait for each other: use engine.num_threads = {cores}.",
    )


def _model(settings: Settings, tier: Tier, path: str) -> Finding:
    """Configuration, weights and tokenizer are there and of a supported kind."""
    from outrider.engine.errors import UnsupportedModelError
    from outrider.engine.model.read_config import read_model_config
    from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
    from outrider.gateway.wiring.checkpoints import checkpoint

    name = f"{tier} model"
    if is_missing_folder(path):
        return Finding(
            name=name,
            status="failed",
            detail=f"{path} is not a folder",
            advice=fetch_advice(path)
            or f"Name a folder with a checkpoint, or a Hugging Face id, with --{tier}.",
        )
    revision = settings.models.revision(tier)
    fetched = f"{path} is fetched from the Hugging Face hub at the first start"
    if revision is None and not Path(path).expanduser().exists():
        return Finding(name=name, status="ok", detail=fetched)
    try:
        folder = Path(checkpoint(path, revision)).expanduser()
    except UnsupportedModelError as error:
        return Finding(name=name, status="failed", detail=str(error))
    try:
        config = read_model_config(folder)
        tokenizer = load_chat_tokenizer(settings, tier, str(folder))
    except (SettingsError, UnsupportedModelError, OSError, ValueError) as error:
        return _unreadable(name, path, error)
    weights = _weight_bytes(folder)
    if not weights and revision is not None:
        detail = f"{config.architecture} at {folder}, without weights: {fetched}"
        return Finding(name=name, status="ok", detail=detail)
    if not weights:
        return Finding(
            name=name,
            status="failed",
            detail=f"{path} holds no *.safetensors, nor a *.gguf",
            advice="Download the checkpoint again, or convert it to safetensors.",
        )
    formats = f"{tokenizer.dialect.format.name} tools" + ", reasoning" * tokenizer.may_think
    detail = (
        f"{config.architecture}{_way_to_run(config, settings, tier)}, {weights / 2**20:,.1f} MiB, "
        f"{config.dtype}, {formats}, at {path if revision is None else folder}"
    )
    return Finding(name=name, status="ok", detail=detail)


def _unreadable(name: str, path: str, error: Exception) -> Finding:
    if isinstance(error, SettingsError):
        advice = "Correct the template, or leave it out to use the checkpoint's own."
        return Finding(name=name, status="failed", detail=str(error), advice=advice)
    return Finding(
        name=name,
        status="failed",
        detail=f"{path}: {error}",
        advice="Use a checkpoint of an architecture and format that docs/models.md lists.",
    )


def _way_to_run(config: "ModelConfig", settings: Settings, tier: Tier) -> str:
    """Say how a model's weights run, where that is not the usual way."""
    from outrider.gateway.tools.commands.doctor.stored_weights import stored_format, way_to_run

    stored = stored_format(config)
    if stored is not None:
        return f" ({stored} weights, {way_to_run(config, settings, tier)})"
    return "" if config.is_native else " (through transformers)"


def _tokenizers(settings: Settings) -> Finding:
    """Check that the small and the large model share a vocabulary."""
    from outrider.gateway.wiring.drafter import MISMATCH_ADVICE, vocabulary_difference

    name = "tokenizers"
    if not all(folder.is_dir() for folder in _folders(settings)):
        return Finding(name=name, status="ok", detail="compared at the first start")
    difference = vocabulary_difference(settings)
    if difference is None:
        return Finding(name=name, status="ok", detail="the two models share one vocabulary")
    options = settings.speculation
    if not options.enabled:
        detail = f"they differ, which matters only with speculation: {difference}"
        return Finding(name=name, status="ok", detail=detail)
    if options.allow_vocab_mismatch:
        advice = (
            "Drafts use the tokens that both models have; a drafter trained for the large model "
            "is accepted more often."
        )
        return Finding(name=name, status="warning", detail=difference, advice=advice)
    return Finding(name=name, status="failed", detail=difference, advice=MISMATCH_ADVICE)


def _folders(settings: Settings) -> list[Path]:
    """Return where the models lie; what is wrong with one is told where it is checked."""
    from outrider.engine.errors import UnsupportedModelError
    from outrider.gateway.wiring.checkpoints import checkpoint

    folders = []
    for tier, path in settings.models.resolved().items():
        if path is not None:
            with contextlib.suppress(UnsupportedModelError):
                path = checkpoint(path, settings.models.revision(tier))
            folders.append(Path(path).expanduser())
    return folders


def _weight_bytes(folder: Path) -> int:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _loaded_bytes(folder: Path) -> int:
    """Return the memory of a checkpoint's weights, decoded if they are quantised."""
    from outrider.engine.errors import UnsupportedModelError
    from outrider.engine.model.read_config import read_model_config
    from outrider.gateway.tools.measuring.plan.shapes import ModelSizes

    try:
        config = read_model_config(folder)
    except UnsupportedModelError:
        return _weight_bytes(folder)
    return (
        _weight_bytes(folder)
        if config.weight_format is None and not list(folder.glob("*.gguf"))
        else ModelSizes.of(config).weight_bytes
    )


def _memory(settings: Settings) -> Finding:
    """Check that weights and libraries fit into main memory; a GPU's memory is not checked."""
    folders = _folders(settings)
    needed = sum(_loaded_bytes(f) for f in folders if f.is_dir()) + _OVERHEAD_BYTES
    if settings.engine.kv_cache_gib is not None:
        needed += int(settings.engine.kv_cache_gib * _GIB)
    free = available_memory_bytes()
    detail = f"{free / _GIB:.1f} GiB free, about {needed / _GIB:.1f} GiB needed beside the KV cache"
    if needed < free:
        return Finding(name="memory", status="ok", detail=detail)
    return Finding(
        name="memory",
        status="warning" if settings.engine.device != "cpu" else "failed",
        detail=detail,
        advice="Close other programs or use smaller models.",
    )


def _router(settings: Settings) -> Finding:
    from outrider.router.costs import TypicalRequest
    from outrider.router.loading import RoutingOptions, load_router

    path = settings.models.resolved_router()
    if path is None:
        detail = "none for this pair: `auto` lets the small model begin and judges its first tokens"
        return Finding(name="router", status="ok", detail=detail)
    load_router(path, ("small", "large"), RoutingOptions(), TypicalRequest())
    return Finding(name="router", status="ok", detail=f"at {path}")


def _tier(name: str, settings: Settings) -> Finding:
    """Request the lists of models from an upstream tier's servers."""
    from outrider.gateway.tools.commands.doctor.tiers import check_tier

    return check_tier(name, settings, os.environ)


def _port(settings: Settings) -> Finding:
    server = settings.server
    try:
        listen(server.host, server.port).close()
    except SettingsError as error:
        return Finding(
            name="port",
            status="failed",
            detail=str(error).partition(". ")[0],
            advice="Choose another port with --port, or stop the program that uses it.",
        )
    return Finding(name="port", status="ok", detail=f"{server.host}:{server.port} is free")
