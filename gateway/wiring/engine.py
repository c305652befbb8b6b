"""The engine's part of the wiring: settings in; models, their caches and drafters out.

Everything heavy is imported inside functions: the gateway's process asks this module about models,
and loads no torch for that.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.cache.recurrent_lines import RecurrentSizes
from engine.errors import EngineError, InvalidAdapterError
from engine.events import AdapterInfo
from engine.model.quantised.formats import DECODE, Decode, Rounding
from engine.request import TIERS, Tier
from gateway.adapters.files import adapter_ref
from gateway.backends.step_loop import LoadingCallback
from gateway.settings.adapters import parse_adapter
from gateway.settings.paths import cache_folder
from gateway.settings.tree import Settings
from gateway.wiring.chat_tokenizers import load_chat_tokenizer
from gateway.wiring.checkpoints import named_models
from gateway.wiring.hardware import usable_physical_cores
from gateway.wiring.kv_budget import cache_sizes, kv_dtype
from gateway.wiring.tensor_parallel import has_ranks, start_ranks, threads_of_rank

if TYPE_CHECKING:
    import torch

    from draft.budget import TreeBudget
    from draft.config import DraftConfig
    from draft.token_map import TokenMap
    from draft.tree_drafter import TreeDrafter
    from engine.core import Engine
    from engine.grammar.grammar import GrammarCompiler
    from engine.model.protocol import CausalModel
    from engine.parallel.messages import ModelSource
    from engine.parallel.ranks import Ranks
    from engine.passes.runner import ModelRunner
    from engine.passes.step_times import CurveStore

log = logging.getLogger(__name__)

_BYTES_PER_THREAD = 16 * 2**20  # about a millisecond of memory traffic

MISMATCH_ADVICE = (
    "To serve both without drafting: --no-speculation (speculation.enabled = false). To draft "
    "through the tokens that both have: --allow-vocab-mismatch (speculation.allow_vocab_mismatch "
    "= true)."
)


def default_num_threads(weight_bytes: int) -> int:
    """Return the threads for a model of this size: all physical cores, fewer if they would wait.

    A pass of a few MiB takes as long as the barriers between its operations. One thread does it
    faster then, and on a small machine leaves a core to HTTP.
    """
    return max(1, min(usable_physical_cores(), round(weight_bytes / _BYTES_PER_THREAD)))


def load_runners(settings: Settings, on_progress: LoadingCallback) -> "dict[Tier, ModelRunner]":
    """Load the models, each with its KV cache. Raises EngineError."""
    if not settings.models.is_any:
        raise EngineError("No model is configured; name one with --large or --small.")
    device = _pick_device(settings.engine.device)
    _check_modes(settings, device)
    if device.type == "cpu":
        tell_products()
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
) -> "dict[Tier, ModelRunner]":
    """ranks: the large model's others, None where it is in one piece."""
    import torch

    from engine.model.load import load_model
    from engine.model.shard import WHOLE
    from engine.parallel.runner import ParallelRunner
    from engine.passes.runner import ModelRunner

    options = settings.engine
    models: dict[Tier, CausalModel] = {}
    make_runner: dict[Tier, Callable[..., ModelRunner]] = {}
    for tier in named_models(settings):
        source, shard, make_runner[tier] = _source(settings, tier), WHOLE, ModelRunner
        if ranks is not None and tier == "large":
            shard, make_runner[tier] = ranks.shard, partial(ParallelRunner, ranks=ranks)
        models[tier] = load_model(
            source.path,
            dtype=source.dtype,
            device=device,
            deterministic=source.deterministic,
            max_context=source.max_context,
            rounding=source.rounding,
            on_progress=partial(_report, on_progress, f"loading the {tier} model"),
            shard=shard,
        )
    if ranks is not None:
        ranks.join(models["large"])
        torch.set_num_threads(threads_of_rank(settings))
    else:
        weight_bytes = max(model.weight_bytes for model in models.values())
        torch.set_num_threads(options.num_threads or default_num_threads(weight_bytes))
    sizes = cache_sizes(settings, models, device)
    runners = {
        tier: make_runner[tier](
            model=model,
            num_blocks=sizes.num_blocks[tier],
            num_window_blocks=sizes.num_window_blocks.get(tier),
            recurrent_sizes=sizes.recurrent.get(tier, RecurrentSizes()),
            block_size=options.block_size,
            max_context=options.max_context,
            prefix_caching=options.prefix_caching,
            kv_dtype=kv_dtype(settings, model),
            cuda_graphs=options.cuda_graphs,
        )
        for tier, model in models.items()
    }
    capture_graphs(runners, on_progress)
    return runners


def _source(settings: Settings, tier: Tier) -> "ModelSource":
    """Return a tier's checkpoint, and how it is loaded."""
    from engine.parallel.messages import ModelSource

    return ModelSource(
        path=named_models(settings)[tier],
        dtype=settings.engine.dtype,
        deterministic=_deterministic(settings),
        max_context=settings.engine.max_context,
        rounding=_rounding(settings, tier),
    )


def tell_products() -> None:
    """Warn where products could be compiled and are not, as after an update without a build."""
    from kernels.cpu.product_library import product_support

    support = product_support()
    if support.advice:
        log.warning("matrix products are %s advice=%s", support.detail, support.advice)


def _deterministic(settings: Settings) -> bool | None:
    """Return whether it is asked for; None for "where it costs nothing"."""
    options = settings.engine
    if options.deterministic != "auto":
        return options.deterministic
    # The compiled attention reads no fp8: keeping rows' bits would cost half of the speed.
    return False if options.kv_cache_dtype == "fp8" else None


def _rounding(settings: Settings, tier: Tier) -> Rounding | Decode | None:
    """Return how a tier's weights are rounded; they are kept beside other files of its kind."""
    if settings.models.decodes(tier):
        return DECODE
    scheme = settings.models.scheme(tier)
    if scheme is None:
        return None
    cache = cache_folder(os.environ)
    return Rounding(scheme=scheme, keep_in=None if cache is None else cache / "quantised")


def capture_graphs(runners: "Mapping[Tier, ModelRunner]", on_progress: LoadingCallback) -> None:
    """Record the runners' passes as CUDA graphs, where they run on CUDA and are to.

    Raises EngineError.
    """
    import torch

    for tier, runner in runners.items():
        stage = f"capturing graphs of the {tier} model"
        try:
            runner.capture_graphs(partial(_report, on_progress, stage))
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"The GPU's memory does not suffice for the CUDA graphs of the {tier} model beside "
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
    from draft.tree_warm_up import warm_up_trees
    from engine.core import Engine
    from engine.warm_up import warm_up, warm_up_briefly
    from kernels.triton_support import uses_triton
    from verifier.coupled import CoupledVerifier

    drafter = _build_drafter(settings, runners, None)
    engine = Engine(runners=runners, verifier=CoupledVerifier(), drafter=drafter)
    if any(uses_triton(runner.device) for runner in runners.values()):
        if drafter is not None:
            warm_up_trees(_draft_config(settings), runners["small"].device)
        warm_up(engine, partial(_report, on_progress, "compiling kernels"))
    else:
        warm_up_briefly(engine)


def join(
    settings: Settings,
    runners: "Mapping[Tier, ModelRunner]",
    budget: "TreeBudget | None",
    grammars: "Mapping[Tier, GrammarCompiler] | None" = None,
) -> "Engine":
    """Build an engine on loaded models. Several may share them if only one works at a time.

    grammars: compilers that are there already; None makes them.

    Raises EngineError when the small model cannot draft for the large one.
    """
    from engine.config import EngineConfig
    from engine.core import Engine
    from engine.queue.fair_queue import FairQueue
    from engine.queue.slo_queue import SloQueue
    from verifier.coupled import CoupledVerifier

    options = settings.engine
    return Engine(
        policy=SloQueue() if settings.slo.queue == "deadlines" else FairQueue(),
        runners=runners,
        verifier=CoupledVerifier(),
        drafter=_build_drafter(settings, runners, budget),
        grammars=build_grammars(settings, runners) if grammars is None else grammars,
        config=EngineConfig(
            max_sequences=options.max_sequences,
            max_waiting=options.max_waiting,
            max_tokens_per_step=options.max_tokens_per_step,
            overlap=options.overlap,
            max_adapters=settings.adapters.max_resident,
            max_adapter_bytes=settings.adapters.memory_mib << 20,
        ),
    )


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


def measure_budget(
    settings: Settings,
    runners: "Mapping[Tier, ModelRunner]",
    on_progress: LoadingCallback,
    saved: "CurveStore | None" = None,
) -> "TreeBudget | None":
    """Return the times of passes on this machine, which set the trees' sizes.

    None where no tokens are drafted, or where the trees' sizes are fixed. `saved`: measurements of
    earlier starts, which are taken where there are any.
    """
    from draft.budget import TreeBudget
    from engine.passes.step_times import follow_step_times

    options = settings.speculation
    if not (options.enabled and options.adaptive) or len(runners) < len(TIERS):
        return None
    times = {
        tier: follow_step_times(
            runner,
            on_progress=partial(_report, on_progress, f"timing the {tier} model"),
            saved=saved,
        )
        for tier, runner in runners.items()
    }
    return TreeBudget(target_pass_s=times["large"], draft_pass_s=times["small"])


def saved_times(settings: Settings) -> "CurveStore | None":
    """Pass times that earlier starts with these settings measured here; None without a folder."""
    from engine.passes.saved_times import SavedTimes

    options = settings.engine
    conditions = options.model_dump(
        mode="json", include={"block_size", "cuda_graphs", "deterministic", "overlap"}
    )
    folder = options.cache_folder or cache_folder(os.environ)
    return None if folder is None else SavedTimes(folder, conditions)


def allowed_difference(settings: Settings) -> str | None:
    """Return `vocabulary_difference`, unless it makes a configured drafter useless.

    Raises EngineError in that case.
    """
    options = settings.speculation
    difference = vocabulary_difference(settings)
    if difference is not None and options.enabled and not options.allow_vocab_mismatch:
        raise EngineError(
            "The small model cannot draft for the large one: their tokenizers differ "
            f"({difference}), so its tokens would mean something else. {MISMATCH_ADVICE}"
        )
    return difference


def vocabulary_difference(settings: Settings) -> str | None:
    """Return a sentence on how the two tiers' tokenizers differ; None when they do not.

    Raises EngineError for a tokenizer that cannot be loaded.
    """
    from draft.vocabulary import describe_difference

    large, small = (
        _load_tokenizer(path).backend_tokenizer.get_vocab(with_added_tokens=True)
        for path in _both_models(settings)
    )
    return describe_difference(large, small)


def build_grammars(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]"
) -> "dict[Tier, GrammarCompiler]":
    """Return a grammar compiler for each tier; one for both where they share the tokenizer.

    A tier whose tokens have no fixed text, or no end, gets none: structured output is refused.
    """
    from engine.grammar.process import CompileBounds
    from engine.grammar.xgrammar_backend import XGrammarCompiler

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
            log.warning("no structured output tier=%s reason=tokenizer", tier)
            continue
        # Models pad their vocabulary differently; padding is no token.
        vocab_size = min(len(token_bytes), runners[tier].vocab_size)
        key = (tokenizer.fingerprint, tokenizer.stop_token_ids)
        if key not in found:
            found[key] = XGrammarCompiler(
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
    from kernels.triton_support import triton

    if settings.engine.deterministic is True and device.type == "cuda" and triton is None:
        raise EngineError(
            "engine.deterministic on a GPU needs Triton, which is not installed here (it exists on "
            "Linux only). Install triton, use --device cpu, or leave engine.deterministic off."
        )


def _build_drafter(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]", budget: "TreeBudget | None"
) -> "TreeDrafter | None":
    """Build the small model as the large one's drafter, if both are loaded."""
    from draft.tree_drafter import TreeDrafter

    options = settings.speculation
    if not options.enabled or len(runners) < len(TIERS):
        return None
    small, large = runners["small"], runners["large"]
    config = _draft_config(settings)
    if allowed_difference(settings) is not None:
        token_map = _build_token_map(settings, runners)
        log.warning("drafting across vocabularies: covered_share=%.3f", token_map.covered_share)
        return TreeDrafter(runner=small, config=config, budget=budget, token_map=token_map)
    has_gpu = small.device.type == "cuda"
    grows_on_device = options.on_device == "on" or (options.on_device == "auto" and has_gpu)
    return TreeDrafter(
        runner=small,
        config=config,
        budget=budget,
        device_target=large if grows_on_device else None,
    )


def _draft_config(settings: Settings) -> "DraftConfig":
    from draft.config import DraftConfig

    options = settings.speculation
    return DraftConfig(
        max_draft_nodes=options.max_draft_nodes,
        max_draft_depth=options.max_draft_depth,
        max_text_depth=options.max_text_depth,
        max_branching=options.max_branching,
        max_frontier=options.max_frontier,
        sources=options.sources,
    )


def _build_token_map(settings: Settings, runners: "Mapping[Tier, ModelRunner]") -> "TokenMap":
    from draft.token_map import SpecialTokens, TokenMap

    target, draft = (_load_tokenizer(path) for path in _both_models(settings))
    return TokenMap(
        target=target.backend_tokenizer,
        draft=draft.backend_tokenizer,
        target_vocab_size=runners["large"].vocab_size,
        draft_vocab_size=runners["small"].vocab_size,
        target_special=SpecialTokens(bos=target.bos_token_id, eos=target.eos_token_id),
        draft_special=SpecialTokens(bos=draft.bos_token_id, eos=draft.eos_token_id),
    )


def _both_models(settings: Settings) -> tuple[str, str]:
    """Return paths or hub ids of the large and the small model, where both are named."""
    named = named_models(settings)
    return named["large"], named["small"]


def _load_tokenizer(path: str) -> Any:
    """Load the fast tokenizer of a folder or hub id. Raises EngineError."""
    from gateway.text.plain_tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise EngineError(f"{path}: it has no fast tokenizer (tokenizer.json).")
    return tokenizer


def _report(on_progress: LoadingCallback, stage: str, done: int, total: int) -> None:
    on_progress(stage, done / max(total, 1))
