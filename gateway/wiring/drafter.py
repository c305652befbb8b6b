"""The drafter's part of the wiring: what guesses for the large model, and what its passes take.

Everything heavy is imported inside functions, as in `outrider.gateway.wiring.engine`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from outrider.engine.errors import EngineError
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.checkpoints import named_models
from outrider.verifier.params import TIERS, Source, Tier

if TYPE_CHECKING:
    from outrider.draft.budget.budget import TreeBudget
    from outrider.draft.config import DraftConfig
    from outrider.draft.guesses.head_texts import Head
    from outrider.draft.heads.protocol import HeadModel
    from outrider.draft.text.token_map import TokenMap
    from outrider.draft.tree_drafter import TreeDrafter
    from outrider.engine.model.protocol import CausalModel
    from outrider.engine.passes.runner import ModelRunner
    from outrider.engine.passes.saved_times import SavedTimes
    from outrider.engine.passes.step_times import CurveStore

logger = logging.getLogger(__name__)

MISMATCH_ADVICE = (
    "To serve both without drafting: --no-speculation (speculation.enabled = false). To draft "
    "through the tokens that both have: --allow-vocab-mismatch (speculation.allow_vocab_mismatch "
    "= true)."
)


_OF_MODELS: Final[frozenset[Source]] = frozenset(("model", "head"))


class Runners(dict[Tier, "ModelRunner"]):
    """The runners of the tiers. `head`: what drafts for the large one by its hidden states."""

    head: "Head | None" = None


def load_head(
    settings: Settings, models: "Mapping[Tier, CausalModel]", on_progress: LoadingCallback
) -> "HeadModel | None":
    """Read the head that `models.drafter` names; None for none. Raises EngineError."""
    path = settings.models.drafter
    if path is None or not settings.speculation.enabled:
        return None
    from outrider.draft.heads.read_head import read_head
    from outrider.engine.model.decoder import DecoderModel
    from outrider.engine.model.weights import resolve_checkpoint
    from outrider.engine.model.whole_ends import ends_of

    large = models.get("large")
    if large is None:
        raise EngineError(
            f"models.drafter (--drafter) = {path!r} drafts for the large model, but there is none: "
            "name one with --large."
        )
    if not isinstance(large, DecoderModel):
        raise EngineError(
            f"models.drafter (--drafter) = {path!r} reads the hidden states of "
            f"{large.config.model_id}, which runs through transformers' modules; heads draft for "
            "models with layers of Outrider's own."
        )
    if (revision := settings.models.drafter_revision) is not None:
        path = str(resolve_checkpoint(path, revision))
    return read_head(
        path,
        ends_of(large),
        max_context=settings.engine.max_context,
        on_progress=partial(report, on_progress, "loading the drafter"),
    )


def make_head(settings: Settings, model: "HeadModel", large: "ModelRunner") -> "Head":
    """Give a head its KV cache, which holds as many tokens as the large model's."""
    from outrider.draft.guesses.head_texts import Head
    from outrider.engine.passes.runner import ModelRunner

    options = settings.engine
    runner = ModelRunner(
        model=model,
        num_blocks=large.pool.num_blocks,
        block_size=options.block_size,
        max_context=options.max_context,
        prefix_caching=options.prefix_caching,
        cuda_graphs=options.cuda_graphs,
    )
    return Head(model=model, runner=runner, vocab_size=large.vocab_size)


def report(on_progress: LoadingCallback, stage: str, done: int, total: int) -> None:
    """Tell how far a stage of loading is."""
    on_progress(stage, done / max(total, 1))


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
    from outrider.draft.budget.budget import TreeBudget
    from outrider.engine.passes.step_times import follow_step_times

    if not (_drafts(settings, runners) and settings.speculation.adaptive):
        return None
    head = head_of(runners)
    timed: dict[str, ModelRunner] = {f"{tier} model": runner for tier, runner in runners.items()}
    if head is not None:
        timed["drafter"] = head.runner
    times = {
        name: follow_step_times(
            runner, on_progress=partial(report, on_progress, f"timing the {name}"), saved=saved
        )
        for name, runner in timed.items()
    }
    of_head = times.get("drafter")
    of_large = times["large model"]
    # Where text alone drafts, no draft's pass is ever asked for.
    of_draft = times.get("small model") or of_head or of_large
    return TreeBudget(target_pass_s=of_large, draft_pass_s=of_draft, head_pass_s=of_head)


def _drafts(settings: Settings, runners: "Mapping[Tier, ModelRunner]") -> bool:
    """Return whether the large model has a drafter: a model, a head, or text alone."""
    if not settings.speculation.enabled or "large" not in runners:
        return False
    if len(runners) == len(TIERS) or head_of(runners) is not None:
        return True
    return bool(set(settings.speculation.sources) - _OF_MODELS)


def head_of(runners: "Mapping[Tier, ModelRunner]") -> "Head | None":
    """Return the head that was loaded with these runners."""
    return runners.head if isinstance(runners, Runners) else None


def allowed_difference(settings: Settings) -> str | None:
    """Return `vocabulary_difference`, unless it makes a configured drafter useless.

    Raises EngineError in that case.
    """
    options = settings.speculation
    difference = vocabulary_difference(settings)
    is_refused = options.enabled and not options.allow_vocab_mismatch
    if difference is not None and is_refused and settings.models.drafter is None:
        raise EngineError(
            "The small model cannot draft for the large one: their tokenizers differ "
            f"({difference}), so its tokens would mean something else. {MISMATCH_ADVICE}"
        )
    return difference


def vocabulary_difference(settings: Settings) -> str | None:
    """Return a sentence on how the two tiers' tokenizers differ; None when they do not.

    Raises EngineError for a tokenizer that cannot be loaded.
    """
    from outrider.draft.text.vocabulary import describe_difference

    large, small = (
        _load_tokenizer(path).backend_tokenizer.get_vocab(with_added_tokens=True)
        for path in _both_models(settings)
    )
    return describe_difference(large, small)


def build_drafter(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]", budget: "TreeBudget | None"
) -> "TreeDrafter | None":
    """Build the large model's drafter: the small model if both are loaded, a head, or both.

    Where there is neither, what needs no model drafts: repeated text, predictions, grammars, and a
    small answer that another engine or server gave.
    """
    from outrider.draft.tree_drafter import TreeDrafter

    options, head = settings.speculation, head_of(runners)
    if not _drafts(settings, runners):
        return None
    config, large = draft_config(settings), runners["large"]
    with_head = partial(
        TreeDrafter,
        head=head,
        config=config,
        budget=budget,
        device_target=large if _grows_on_device(settings, large) else None,
    )
    if len(runners) < len(TIERS):
        return with_head(runner=None)
    small = runners["small"]
    if allowed_difference(settings) is not None:
        if not options.allow_vocab_mismatch:
            logger.warning("the small model does not draft reason=tokenizer")
            return with_head(runner=None)
        token_map = _build_token_map(settings, runners)
        logger.warning("drafting across vocabularies: covered_share=%.3f", token_map.covered_share)
        return TreeDrafter(
            runner=small, head=head, config=config, budget=budget, token_map=token_map
        )
    return with_head(runner=small)


def keep_lessons(
    settings: Settings,
    runners: "Mapping[Tier, ModelRunner]",
    drafter: "TreeDrafter",
    saved: "SavedTimes",
) -> Callable[[], None]:
    """Have a drafter begin with what an earlier start learnt, and keep what it learns.

    Beside pass times, for the same models, machine and limits of trees. Returns what saves it for
    the last time.
    """
    from outrider.draft.saved_lessons import SavedLessons
    from outrider.engine.passes.saved_times import digest_of

    timed: dict[str, ModelRunner] = dict(runners.items())
    if (head := head_of(runners)) is not None:
        timed["head"] = head.runner
    conditions = {
        "runners": {name: saved.digest(runner) for name, runner in timed.items()},
        "limits": asdict(draft_config(settings)),
    }
    lessons = SavedLessons(saved.folder / f"lessons-{digest_of(conditions)}.json", drafter.choice)
    lessons.recall()
    return lessons.start()


def _grows_on_device(settings: Settings, large: "ModelRunner") -> bool:
    wanted = settings.speculation.on_device
    return wanted == "on" or (wanted == "auto" and large.device.type == "cuda")


def capture_draft_levels(
    settings: Settings, runners: "Mapping[Tier, ModelRunner]", runner: "ModelRunner"
) -> None:
    """Record the levels of the trees that a runner's model drafts, if any grow on the device."""
    from outrider.draft.device.draft_levels import capture_levels

    large, head = runners.get("large"), head_of(runners)
    if not settings.speculation.enabled or large is None or not _grows_on_device(settings, large):
        return
    if head is not None and runner is head.runner:
        capture_levels(draft_config(settings), runner, large, head)
    elif runner is runners.get("small") and allowed_difference(settings) is None:
        capture_levels(draft_config(settings), runner, large)


def draft_config(settings: Settings) -> "DraftConfig":
    """Return the limits of trees."""
    from outrider.draft.config import DraftConfig

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
    from outrider.draft.text.token_map import SpecialTokens, TokenMap

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
    from outrider.gateway.answering.text.plain_tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise EngineError(f"{path}: it has no fast tokenizer (tokenizer.json).")
    return tokenizer
