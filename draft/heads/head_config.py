"""Read a drafter's config.json into the description of a head.

Two layouts are published. SafeAILab's and SpecForge's is a flat config of the drafter's layers;
speculators' has them in `transformer_layer_config`, beside `speculators_model_type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from outrider.draft.heads.protocol import HeadError, HeadKind, TargetModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import read_object
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.read_config import describe

MAX_LAYERS: Final = 64
"""Far above any drafter's."""
_MAX_TAPS: Final = 64
_MAX_BLOCK: Final = 64
"""Rows of a block: what tree masks of the attention hold at least."""
_KIND_OF_ARCHITECTURE: Final[Mapping[str, HeadKind]] = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "PEagleDraftModel": "peagle",
    "DFlashDraftModel": "dflash",
}
_KIND_OF_SPECULATOR: Final[Mapping[str, HeadKind]] = {
    "eagle3": "eagle3",
    "peagle": "peagle",
    "dflash": "dflash",
}
# transformers' names of layers, and what they are here.
_FAMILY_OF_LAYERS: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What speculators up to 0.9 writes; what a newer version adds may change what a head computes.
_SPECULATORS_KNOWN: Final = "0.9"
_SPECULATORS_FIELDS: Final = frozenset(
    (
        *("architectures", "auto_map", "dtype", "has_no_defaults_at_init", "model_type"),
        *("speculators_config", "speculators_model_type", "speculators_version", "torch_dtype"),
        *(
            "num_nextn_predict_layers",
            "target_fingerprint",
            "tie_word_embeddings",
            "transformers_version",
        ),
        *("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "embed_requires_grad"),
        *("eagle_aux_hidden_state_layer_ids", "fc_norm", "mask_token_id", "norm_before_fc"),
        *("norm_before_residual", "norm_output", "sample_from_anchor"),
        *("sliding_window_non_causal", "target_hidden_size", "transformer_layer_config"),
    )
)
_PARALLEL: Final = "ptd_token_id"
"""The mask token of a P-EAGLE drafter that calls itself EAGLE-3."""
# Of a config that leaves them out.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 1,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_WRONG_VALUES: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's description in config.json."""

    kind: HeadKind
    layers: ModelConfig
    """The drafter's own, with its vocabulary and the large model's positions."""
    target_vocab_size: int
    taps: tuple[int, ...]
    """Numbered as `Taps` numbers them."""
    norm_before_fc: bool = False
    """One norm over all taps."""
    fc_norm: bool = False
    """One norm for each tap."""
    norm_before_residual: bool = False
    """The first layer's residual stream is normalised."""
    norm_output: bool = False
    """Rows of the next level carry normalised rows."""
    mask_token_id: int | None = None
    block_size: int = 1
    """Rows of a block."""
    samples_first: bool = False
    """The logits of a block's first row count."""
    causal_windows: bool = False
    """Layers with a window see no later rows of a block."""
    target_fingerprint: str | None = None


def read_head_config(folder: Path, target: TargetModel) -> HeadConfig:
    """Read a folder's config.json; raises HeadError if the head is not for `target`."""
    raw = read_object(folder / "config.json")
    if raw is None:
        raise HeadError(
            f"{folder} is not a drafter: it has no config.json with an object in it. Give a folder "
            "or hub id of an EAGLE-3, P-EAGLE or DFlash checkpoint, or 'mtp'."
        )
    try:
        found = _read(folder, raw, target.config)
    except HeadError:
        raise
    except (UnsupportedModelError, *_WRONG_VALUES) as error:
        raise HeadError(f"{folder}: config.json cannot be read: {error}") from error
    _check_target(folder, found, target)
    return found


def is_head(folder: Path) -> bool:
    """True for a folder whose config.json names a drafter that reads hidden states."""
    raw = read_object(folder / "config.json") or {}
    return "speculators_model_type" in raw or _architecture(raw) in _KIND_OF_ARCHITECTURE


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    return str(architectures[0] if isinstance(architectures, list) and architectures else None)


def is_saved_mtp(folder: Path, target: TargetModel) -> bool:
    """True for an MTP head that speculators saved; raises HeadError for one of another model."""
    raw = read_object(folder / "config.json") or {}
    if raw.get("speculators_model_type") != "mtp":
        return False
    _check_speculators(folder, raw)
    layers, config = raw["transformer_layer_config"], target.config
    layers = layers.get("text_config") or layers
    for name, own in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size)):
        if isinstance(layers, dict) and layers.get(name, own) != own:
            raise HeadError(
                f"{folder} was trained for a model with {name} = {str(layers[name])[:50]}, but "
                f"{config.model_id} has {own}. Name a drafter that was trained for this model."
            )
    _check_fingerprint(folder, raw.get("target_fingerprint"), target)
    return True


def _read(folder: Path, raw: dict[str, Any], target: ModelConfig) -> HeadConfig:
    kind = _kind(folder, raw)
    is_speculators = "speculators_model_type" in raw
    if kind == "eagle3" and raw.get(_PARALLEL) is not None:
        kind = "peagle"
    if is_speculators:
        _check_speculators(folder, raw)
    layers = raw["transformer_layer_config"] if is_speculators else raw
    options = {**layers, **raw} if is_speculators else raw
    shape = _describe_layers(folder, layers, kind)
    hidden_size = options.get("target_hidden_size") or shape.hidden_size
    if hidden_size != target.hidden_size:
        raise HeadError(
            f"{folder} reads hidden states of {hidden_size} numbers, but {target.model_id} has a "
            f"hidden size of {target.hidden_size}: it was trained for another model. Name a "
            "drafter that was trained for this one."
        )
    dflash = options.get("dflash_config") or {}
    mask_token_id = options.get("mask_token_id", dflash.get("mask_token_id"))
    draft_vocab = options.get("draft_vocab_size") or shape.vocab_size
    num_target_layers = options.get("num_target_layers")
    if num_target_layers not in (None, target.num_layers):
        raise HeadError(
            f"{folder} was trained for a model of {str(num_target_layers)[:50]} layers, but "
            f"{target.model_id} has {target.num_layers}. Name a drafter that was trained for it."
        )
    if dflash.get("projector_type"):
        raise HeadError(
            f"{folder} corrects its guesses by a {dflash['projector_type']!r} head, which is not "
            "supported; plain DFlash drafters are."
        )
    first = _flag(folder, options, "sample_from_anchor") or _flag(folder, dflash, "shift_label")
    block_size = _block_size(folder, kind, options)
    return HeadConfig(
        kind=kind,
        layers=replace(
            shape,
            vocab_size=draft_vocab,
            max_position_embeddings=target.max_position_embeddings,
            tie_word_embeddings=False,
        ),
        target_vocab_size=shape.vocab_size,
        taps=_taps(folder, kind, options, target),
        norm_before_fc=_flag(folder, options, "norm_before_fc"),
        fc_norm=_flag(folder, options, "fc_norm"),
        norm_before_residual=_flag(folder, options, "norm_before_residual"),
        norm_output=_flag(folder, options, "norm_output"),
        mask_token_id=options.get(_PARALLEL) if mask_token_id is None else mask_token_id,
        block_size=block_size,
        samples_first=first or kind == "peagle",
        causal_windows=is_speculators and not _flag(folder, options, "sliding_window_non_causal"),
        target_fingerprint=options.get("target_fingerprint"),
    )


def _flag(folder: Path, options: Mapping[str, Any], name: str) -> bool:
    """Return a setting that is on or off, off where it is left out."""
    value = options.get(name)
    if not (value is None or isinstance(value, bool)):
        raise HeadError(f"{folder}: {name} = {str(value)[:50]} is neither true nor false.")
    return bool(value)


def _kind(folder: Path, raw: Mapping[str, Any]) -> HeadKind:
    """Return the kind of head that a config describes."""
    named = raw.get("speculators_model_type")
    if named is not None:
        kind = _KIND_OF_SPECULATOR.get(str(named))
        if kind is None:
            raise HeadError(
                f"{folder} is a {str(named)[:50]!r} drafter of speculators "
                f"{str(raw.get('speculators_version', '(no version stated)'))[:50]}, which is not "
                f"supported; supported are {', '.join(_KIND_OF_SPECULATOR)}, mtp."
            )
        return kind
    architecture = _architecture(raw)
    kind = _KIND_OF_ARCHITECTURE.get(architecture)
    if kind is None:
        raise HeadError(
            f"{folder} is a {architecture[:80]}, not a drafter that reads hidden states; "
            f"those are {', '.join(_KIND_OF_ARCHITECTURE)} and the drafters of speculators. A "
            "language model of its own is a small model: name it as one."
        )
    return kind


def _check_speculators(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise HeadError for settings that speculators had not when this was written."""
    unknown = sorted(
        name for name, value in raw.items() if value and name not in _SPECULATORS_FIELDS
    )
    if unknown:
        raise HeadError(
            f"{folder}: config.json has {', '.join(unknown)[:200]}, of speculators "
            f"{str(raw.get('speculators_version', '(no version stated)'))[:50]}; what files of up "
            f"to speculators {_SPECULATORS_KNOWN} hold can be read. Update outrider, or export "
            "the drafter without it."
        )
    if not isinstance(raw.get("transformer_layer_config"), dict):
        raise HeadError(f"{folder}: config.json has no object transformer_layer_config.")


def _describe_layers(folder: Path, layers: Mapping[str, Any], kind: HeadKind) -> ModelConfig:
    """Return the description of a drafter's layers, in its target's vocabulary."""
    model_type = str(layers.get("model_type", "llama"))
    if model_type not in _FAMILY_OF_LAYERS:
        raise HeadError(
            f"{folder} has layers of type {model_type[:50]!r}; drafters with layers of type "
            f"{' or '.join(_FAMILY_OF_LAYERS)} can be read."
        )
    count = layers.get("num_hidden_layers", 1)
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise HeadError(
            f"{folder}: num_hidden_layers = {str(count)[:50]} is not a number from 1 to "
            f"{MAX_LAYERS}."
        )
    fields = {**_DEFAULTS, **layers}
    if kind == "dflash" and "sliding_attention" in (layers.get("layer_types") or ()):
        fields["use_sliding_window"] = True
    nested = fields.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get("sliding_attention"), dict):
        fields["rope_parameters"] = nested["sliding_attention"]
    return describe(str(folder), _FAMILY_OF_LAYERS[model_type], SimpleNamespace(**fields))


def _taps(
    folder: Path, kind: HeadKind, options: Mapping[str, Any], target: ModelConfig
) -> tuple[int, ...]:
    """Return the hidden states that a head reads.

    speculators numbers them as we do; SpecForge and DFlash name layers by what they put out.
    """
    last = target.num_layers
    nested = (options.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    dflash = (options.get("dflash_config") or {}).get("target_layer_ids")
    stated = options.get("eagle_aux_hidden_state_layer_ids") or options.get(
        "aux_hidden_state_layer_ids"
    )
    if stated:
        taps = list(stated)
    elif outputs := nested or dflash:
        taps = [layer + 1 for layer in outputs]
    elif kind == "dflash":
        raise HeadError(f"{folder}: config.json names no target_layer_ids to read.")
    else:
        taps = [2, last // 2, last - 3]
    is_sound = all(type(tap) is int and 0 <= tap <= last for tap in taps)
    if not is_sound or len(set(taps)) < len(taps) or len(taps) > _MAX_TAPS:
        raise HeadError(
            f"{folder} reads the hidden states {str(taps)[:100]}, but {target.model_id} has those "
            f"from 0 to {last}, of which it can read each once: it was trained for another model, "
            "or config.json has to state eagle_aux_hidden_state_layer_ids."
        )
    return tuple(taps)


def _block_size(folder: Path, kind: HeadKind, options: Mapping[str, Any]) -> int:
    """Return the rows of a block; speculators states P-EAGLE's as tokens to be guessed."""
    if kind == "eagle3":
        return 1
    size = options.get("block_size")
    if size is None:
        methods = (options.get("speculators_config") or {}).get("proposal_methods") or [{}]
        size = methods[0].get("speculative_tokens", 8)
    if type(size) is not int or not 2 <= size <= _MAX_BLOCK:
        raise HeadError(
            f"{folder}: a block of {str(size)[:50]} rows cannot be run; it has from 2 to "
            f"{_MAX_BLOCK}. config.json has to state the block_size of training."
        )
    return size


def _check_target(folder: Path, found: HeadConfig, target: TargetModel) -> None:
    """Raise HeadError for a head of another vocabulary or of another checkpoint."""
    config = target.config
    if found.target_vocab_size != config.vocab_size:
        raise HeadError(
            f"{folder} was trained for a vocabulary of {found.target_vocab_size} tokens, but "
            f"{config.model_id} has {config.vocab_size}. Name a drafter that was trained for this "
            "model."
        )
    if not 1 <= found.layers.vocab_size <= config.vocab_size:
        raise HeadError(
            f"{folder}: draft_vocab_size = {found.layers.vocab_size} is not a number from 1 to the "
            f"vocabulary's {config.vocab_size}."
        )
    _check_fingerprint(folder, found.target_fingerprint, target)
    mask = found.mask_token_id
    if found.kind != "eagle3" and not (type(mask) is int and 0 <= mask < config.vocab_size):
        raise HeadError(
            f"{folder}: mask_token_id = {str(mask)[:50]} is no token of {config.model_id}, whose "
            f"ids go to {config.vocab_size - 1}; config.json has to state the one of training."
        )


def _check_fingerprint(folder: Path, stated: object, target: TargetModel) -> None:
    """Raise HeadError for a head that states another checkpoint than the large model's."""
    if stated is not None and stated != target.fingerprint:
        raise HeadError(
            f"{folder} was trained for a checkpoint with the fingerprint {str(stated)[:50]}, but "
            f"{target.config.model_id} has {target.fingerprint}. Train a drafter for this "
            "checkpoint, or, if it computes the same, delete target_fingerprint from the "
            "drafter's config.json."
        )
