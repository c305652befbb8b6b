"""The engine's part of the wiring: settings in; models, their caches and drafters out.

Everything heavy is imported inside functions: the gateway's process asks this module about models,
and loads no torch for that.
"""

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.errors import EngineError, InvalidAdapterError
from outrider.engine.events import AdapterInfo
from outrider.engine.model.quantised.formats import Rounding, StoredWay
from outrider.gateway.engines.adapters.files import adapter_ref
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.gateway.settings.adapters import parse_adapter
from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
from outrider.gateway.wiring.checkpoints import fetched_model, named_models
from outrider.gateway.wiring.drafter import (
    Runners,
    build_drafter,
    capture_draft_levels,
    draft_config,
    head_of,
    keep_lessons,
    load_head,
    make_head,
    report,
)
from outrider.gateway.wiring.hardware import usable_physical_cores
from outrider.gateway.wiring.kv_budget import cache_sizes, kv_dtype
from outrider.gateway.wiring.tensor_parallel import has_ranks, start_ranks, threads_of_rank
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    import torch

    from outrider.draft.budget.budget import TreeBudget
    from outrider.engine.cache.extent_store import ExtentStore
    from outrider.engine.cache.peers import Peers
    from outrider.engine.core import Engine
    from outrider.engine.grammar.grammar import GrammarCompiler
    from outrider.engine.model.protocol import CausalModel
    from outrider.engine.parallel.messages import ModelSource
    from outrider.engine.parallel.ranks import Ranks
    from outrider.engine.passes.runner import ModelRunner
    from outrider.engine.passes.saved_times import SavedTimes

logger = logging.getLogger(__name__)

_BYTES_PER_THREAD = 16 * 2**20  # about a millisecond of memory traffic


def default_num_threads(weight_bytes: int) -> int:
    """Return the threads for a model of this size: all physical cores, fewer if they would wait.

    A pass of a few MiB takes as long as the barriers between its operations. One thread does it
    faster then, and on a small machine leaves a core to HTTP.
    """
    return max(1, min(usable_physical_cores(), round(weight_bytes / _BYTES_PER_THREAD)))


def load_runners(settings: Settings, on_progress: LoadingCallback) -> Runners:
    """Load the models and the head, each with its KV cache. Raises EngineError."""
    if not settings.models.is_any:
        raise EngineError("No model is configured; name one with --large or --small.")
    device = _pick_device(settings.engine.device)
    _check_modes(settings, device)
    if settings.engine.numerics == "portable":
        from outrider.kernels.cpu.product_library import compute_portably

        compute_portably()
    if device.type == "cpu":
        log_products()
    ranks: Ranks | None = None
    if has_ranks(settings):
        ranks = start_ranks(settings, device, _source(settings, "large"))
        device = ranks.device
    try:
        return _load_runners(settings, device, ranks, on_progress)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _load_runners(
    settings: Settings,
    device: "torch.device",
    ranks: "Ranks | None",
    on_progress: LoadingCallback,
) -> Runners:
    """`ranks`: the large model's others, None where it is in one piece."""
    import torch

    from outrider.engine.parallel.runner import ParallelRunner
    from outrider.engine.passes.runner import ModelRunner

    options = settings.engine
    models = _load_models(settings, device, ranks, on_progress)
    if ranks is not None:
        ranks.join(models["large"])
        torch.set_num_threads(threads_of_rank(settings))
    else:
        weight_bytes = max(model.weight_bytes for model in models.values())
        torch.set_num_threads(options.num_threads or default_num_threads(weight_bytes))
    head = load_head(settings, models, on_progress)
    sizes = cache_sizes(settings, models, device, head, ranks)
    runners = Runners()
    for tier, model in models.items():
        make_runner: Callable[..., ModelRunner] = ModelRunner
        if ranks is not None and tier == "large":
            make_runner = partial(ParallelRunner, ranks=ranks)
        runners[tier] = make_runner(
            model=model,
            num_blocks=sizes.num_blocks[tier],
            num_window_blocks=sizes.num_window_blocks.get(tier),
            recurrent_sizes=sizes.recurrent.get(tier, RecurrentSizes()),
            block_size=options.block_size,
            max_context=options.max_context,
            prefix_caching=options.prefix_caching,
            kv_dtype=kv_dtype(settings, model),
            cuda_graphs=options.cuda_graphs,
            taps=head.tap_layers if head is not None and tier == "large" else (),
        )
    if head is not None:
        runners.head = make_head(settings, head, runners["large"])
    capture_graphs(settings, runners, on_progress)
    return runners


def _load_models(
    settings: Settings,
    device: "torch.device",
    ranks: "Ranks | None",
    on_progress: LoadingCallback,
) -> "dict[Tier, CausalModel]":
    """Load the models; of the large one, rank 0's part."""
    from outrider.engine.model.load import load_model
    from outrider.engine.model.shard import WHOLE

    models: dict[Tier, CausalModel] = {}
    for tier in named_models(settings):
        source = _source(settings, tier)
        models[tier] = load_model(
            source.path,
            dtype=source.dtype,
            device=device,
            deterministic=source.deterministic,
            max_context=source.max_context,
            rounding=source.rounding,
            on_progress=partial(report, on_progress, f"loading the {tier} model"),
            shard=ranks.shard if ranks is not None and tier == "large" else WHOLE,
        )
    return models


def _source(settings: Settings, tier: Tier) -> "ModelSource":
    """Return a tier's checkpoint, and how it is loaded."""
    from outrider.engine.parallel.messages import ModelSource

    return ModelSource(
        path=fetched_model(settings, tier),
        dtype=settings.engine.dtype,
        deterministic=_deterministic(settings),
        max_context=settings.engine.max_context,
        rounding=_rounding(settings, tier),
    )


def log_products() -> None:
    """Warn where products could be compiled and are not, as after an update without a build."""
    from outrider.kernels.cpu.product_library import product_support

    support = product_support()
    if support.advice:
        logger.warning("matrix products are %s advice=%s", support.detail, support.advice)


def _deterministic(settings: Settings) -> bool | None:
    """Return whether it is asked for; None for "where it costs nothing"."""
    options = settings.engine
    if options.numerics == "portable":
        return True
    if options.deterministic != "auto":
        return options.deterministic
    # The compiled attention reads no fp8: keeping rows' bits would cost half of the speed.
    return False if options.kv_cache_dtype == "fp8" else None


def _rounding(settings: Settings, tier: Tier) -> Rounding | StoredWay | None:
    """Return how a tier's weights are rounded; they are kept beside other files of its kind."""
    if (way := settings.models.stored_way(tier)) is not None:
        return way
    scheme = settings.models.scheme(tier)
    if scheme is None:
        return None
    cache = cache_folder(os.environ)
    return Rounding(scheme=scheme, keep_in=None if cache is None else cache / "quantised")


def capture_graphs(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]", on_progress: LoadingCallback
) -> None:
    """Record passes, and levels of drafts, as CUDA graphs, where they run on CUDA and are to.

    Raises EngineError.
    """
    import torch

    recorded = {f"{tier} model": runner for tier, runner in runners.items()}
    if (head := head_of(runners)) is not None:
        recorded["drafter"] = head.runner
    for name, runner in recorded.items():
        stage = f"capturing graphs of the {name}"
        try:
            if runner.capture_graphs(partial(report, on_progress, stage)):
                capture_draft_levels(settings, runners, runner)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"The GPU's memory does not suffice for the CUDA graphs of the {name} beside "
                "the weights and the KV cache. Lower engine.kv_cache_gib or engine.num_blocks, or "
                "do without graphs: --no-cuda-graphs (engine.cuda_graphs = false)."
            ) from error


def compile_kernels(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]", on_progress: LoadingCallback
) -> None:
    """Have requests served once, so that the first client's is no slower than later ones.

    All kinds where kernels are compiled at their first launch, for which Triton takes a second or
    so each; otherwise a short one of each tier.
    """
    from outrider.draft.device.tree_warm_up import warm_up_trees
    from outrider.engine.core import Engine
    from outrider.engine.warm_up import warm_up, warm_up_briefly
    from outrider.kernels.triton_support import uses_triton

    drafter = build_drafter(settings, runners, None)
    engine = Engine(runners=runners, drafter=drafter)
    if any(uses_triton(runner.device) for runner in runners.values()):
        if drafter is not None:
            warm_up_trees(draft_config(settings), runners["large"].device)
        has_adapters = bool(settings.adapters.lora) or settings.adapters.folder is not None
        for runner in runners.values():
            _warm_up_passes(runner, has_adapters=has_adapters)
        warm_up(engine, partial(report, on_progress, "compiling kernels"))
    else:
        warm_up_briefly(engine)


def _warm_up_passes(runner: "ModelRunner", *, has_adapters: bool) -> None:
    from outrider.engine.adapters.warm_up import adapter_of_nothing
    from outrider.engine.config import EngineConfig
    from outrider.engine.passes.warm_up import warm_up_passes

    max_rows = EngineConfig().max_tokens_per_step
    warm_up_passes(runner, max_rows=max_rows)
    if has_adapters and (adapter := adapter_of_nothing(runner.model)) is not None:
        warm_up_passes(runner, max_rows=max_rows, adapter=adapter)


def join(
    settings: Settings,
    runners: "Mapping[Tier, ModelRunner]",
    budget: "TreeBudget | None",
    grammars: "Mapping[Tier, GrammarCompiler] | None" = None,
    store: "ExtentStore | None" = None,
    peers: "Peers | None" = None,
    saved: "SavedTimes | None" = None,
) -> "Engine":
    """Build an engine on loaded models. Several may share them if only one works at a time.

    `grammars`: compilers that are there already; None makes them. `store`: of blocks that leave
    the caches. `peers`: lines to other engines. `saved`: where what drafting learns is kept, too.

    Raises EngineError when the small model cannot draft for the large one.
    """
    from outrider.engine.config import EngineConfig
    from outrider.engine.core import Engine
    from outrider.engine.queue.fair_queue import FairQueue
    from outrider.engine.queue.slo_queue import SloQueue

    options = settings.engine
    drafter = build_drafter(settings, runners, budget)
    engine = Engine(
        policy=SloQueue() if settings.slo.queue == "deadlines" else FairQueue(),
        runners=runners,
        drafter=drafter,
        grammars=build_grammars(settings, runners) if grammars is None else grammars,
        store=store,
        peers=peers,
        config=EngineConfig(
            max_sequences=options.max_sequences,
            max_waiting=options.max_waiting,
            max_tokens_per_step=options.max_tokens_per_step,
            overlap=options.overlap,
            max_adapters=settings.adapters.max_resident,
            max_adapter_bytes=settings.adapters.memory_mib << 20,
            role=options.role,
        ),
    )
    if saved is not None and drafter is not None and budget is not None:
        weakref.finalize(engine, keep_lessons(settings, runners, drafter, saved))
    return engine


def load_adapters(settings: Settings, engine: "Engine") -> None:
    """Read and check the adapters of the settings. Raises EngineError naming one that is wrong."""
    model_ids = {info.model_id for info in engine.info().tiers.values()}
    for text in settings.adapters.lora:
        named = parse_adapter(text)
        if named.name in model_ids:
            raise EngineError(f"adapter {named.name}: a model has this name; choose another one.")
        outcomes: list[AdapterInfo | InvalidAdapterError] = []
        engine.prepare_adapter(adapter_ref(named), outcomes.append)
        while not outcomes:
            engine.step()
        if isinstance(outcomes[0], InvalidAdapterError):
            raise EngineError(f"adapter {named.name}: {outcomes[0]}")


def publish_blocks(settings: Settings, engine: "Engine") -> None:
    """Publish the prefix cache of the engine's largest model, where the settings say so.

    Raises EngineError for an address that cannot be taken.
    """
    options = settings.engine
    if options.kv_events is None:
        return
    from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys
    from outrider.gateway.engines.backends.kv_events import KvEventPublisher

    keys = None if options.replicas_key is None else read_fleet_keys(options.replicas_key)
    tiers = engine.info().tiers
    publisher = KvEventPublisher(
        tiers.get("large") or tiers["small"],
        endpoint=options.kv_events,
        replay_endpoint=options.kv_events_replay,
        topic=options.kv_events_topic,
        keys=keys,
    )
    engine.blocks.add_sink(publisher.publish)
    weakref.finalize(engine, publisher.close)


def saved_times(settings: Settings) -> "SavedTimes | None":
    """Pass times that earlier starts with these settings measured here; None without a folder."""
    from outrider.engine.passes.saved_times import SavedTimes

    options = settings.engine
    conditions = options.model_dump(
        mode="json", include={"block_size", "cuda_graphs", "deterministic", "overlap"}
    )
    folder = options.cache_folder or cache_folder(os.environ)
    return None if folder is None else SavedTimes(folder, conditions)


def build_grammars(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]"
) -> "dict[Tier, GrammarCompiler]":
    """Return a grammar compiler for each tier; one for both where they share the tokenizer.

    A tier whose tokens have no fixed text, or no end, gets none: structured output is refused.
    """
    from outrider.engine.grammar.llguidance_backend import LLGuidanceCompiler
    from outrider.engine.grammar.process import CompileBounds

    bounds = CompileBounds(
        compile_cpu_s=settings.engine.grammar_compile_s,
        compile_memory_bytes=settings.engine.grammar_memory_mib * 2**20,
        max_grammar_bytes=settings.engine.grammar_size_mib * 2**20,
    )
    found: dict[tuple[str, tuple[int, ...]], GrammarCompiler] = {}
    grammars: dict[Tier, GrammarCompiler] = {}
    for tier, path in named_models(settings).items():
        tokenizer = load_chat_tokenizer(settings, tier, path)
        token_bytes = tokenizer.token_texts
        if token_bytes is None or not tokenizer.stop_token_ids:
            logger.warning("no structured output tier=%s reason=tokenizer", tier)
            continue
        # Models pad their vocabulary differently; padding is no token.
        vocab_size = min(len(token_bytes), runners[tier].vocab_size)
        key = (tokenizer.fingerprint, tokenizer.stop_token_ids)
        if key not in found:
            found[key] = LLGuidanceCompiler(
                token_bytes,
                vocab_size=vocab_size,
                stop_token_ids=tokenizer.stop_token_ids,
                bounds=bounds,
            )
        grammars[tier] = found[key]
    return grammars


def _pick_device(name: str) -> "torch.device":
    """Return the device that `engine.device` means on this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "engine.device is cuda, but torch finds no usable GPU here. Use --device cpu, or "
            "install a CUDA build of torch; `outrider doctor` shows what is installed."
        )
    return torch.device(name)


def _check_modes(settings: Settings, device: "torch.device") -> None:
    """Raise EngineError for a mode that this device cannot run."""
    from outrider.kernels.triton_support import triton

    options = settings.engine
    if options.numerics == "portable" and (
        device.type != "cpu" or options.kv_cache_dtype == "fp8" or options.deterministic is False
    ):
        raise EngineError(
            "engine.numerics portable is for CPUs, in deterministic mode, and has no fp8 cache. "
            "Use --device cpu, and leave engine.kv_cache_dtype and engine.deterministic at auto."
        )
    if settings.engine.deterministic is True and device.type == "cuda" and triton is None:
        raise EngineError(
            "engine.deterministic on a GPU needs Triton, which is not installed here (it exists on "
            "Linux only). Install triton, use --device cpu, or leave engine.deterministic off."
        )
