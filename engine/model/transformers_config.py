"""Configs of decoders that run through transformers, and the refusals that follow from them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import end_token_ids, merged_ids
from outrider.engine.model.families.text_parts import THROUGH_TRANSFORMERS, text_config

# Frequencies that change as a sequence grows would make cached keys wrong.
_GROWING_ROPES: Final = ("dynamic", "longrope")
_OTHER_LAYERS: Final = (
    *("linear", "mamba", "conv", "recurrent", "ssm", "rwkv"),
    *("compress", "index", "sparse"),  # attention over chosen keys
)


class CannotRunError(Exception):
    """The reason why a model cannot run over a paged cache; becomes a sentence."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence what transformers logs and draws while it loads; what matters becomes an error."""
    from transformers.utils import logging as own

    verbosity, has_bar = own.get_verbosity(), own.is_progress_bar_enabled()
    own.set_verbosity(logging.CRITICAL)
    own.disable_progress_bar()
    try:
        yield
    finally:
        own.set_verbosity(verbosity)
        if has_bar:
            own.enable_progress_bar()


def read_transformers_config(model_id: str, raw: dict[str, Any]) -> PreTrainedConfig:
    """Return the config as the installed transformers read it. Raises UnsupportedModelError."""
    architecture = (raw.get("architectures") or ["unknown"])[0]
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:
        if raw.get("auto_map"):
            raise UnsupportedModelError(
                f"{model_id} brings its own code (trust_remote_code), which the engine does not "
                "run. Use a checkpoint whose architecture transformers has."
            ) from error
        written = raw.get("transformers_version", "an unknown version")
        raise UnsupportedModelError(
            f"{model_id} is {architecture} of type {raw.get('model_type')!r}, which transformers "
            f"{transformers.__version__} cannot read: config.json was written by {written}. "
            f"Install a transformers that has it. ({str(error).splitlines()[0][:200]})"
        ) from error
    if architecture in THROUGH_TRANSFORMERS:
        config = text_config(config)
    if config.model_type == "llama4_text":
        _keep_to_first_chunk(config)
    return config


def _keep_to_first_chunk(config: Any) -> None:
    """Let a Llama 4 be served up to its first chunk of attention.

    There its chunked layers see everything, and its temperature, which it would take from the
    place of a row in the pass, is 1.
    """
    limit = min(config.attention_chunk_size or 2**31, int(config.floor_scale) - 1)
    config.max_position_embeddings = min(config.max_position_embeddings, limit)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.attn_temperature_tuning = False


def refuse_by_config(architecture: str, config: PreTrainedConfig) -> None:
    """Raise CannotRunError for a model that its config alone rules out."""
    if getattr(config, "is_encoder_decoder", False):
        raise CannotRunError("it is an encoder-decoder.")
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise CannotRunError("it is not a causal language model.")
    if architecture != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, architecture):
        raise CannotRunError(f"config.json calls it a {config.model_type}, which is another one.")
    if architecture.endswith("ForConditionalGeneration") or config.get_text_config() is not config:
        raise CannotRunError(
            "it takes more than text. A checkpoint of its text model alone can be served."
        )
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    others = sorted({kind for kind in kinds if any(part in kind for part in _OTHER_LAYERS)})
    if others:
        raise CannotRunError(
            f"it has layers that are not attention over all keys or a window of them "
            f"({', '.join(others)})."
        )
    growing = sorted({kind for kind in _rope_types(config) if kind in _GROWING_ROPES})
    if growing:
        raise CannotRunError(
            f"its rotary embeddings ({', '.join(growing)}) change as a sequence grows, which would "
            "make cached keys wrong."
        )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return set()
    several = [found, *(value for value in found.values() if isinstance(value, dict))]
    return {str(each.get("rope_type") or each.get("type") or "default") for each in several}


def inner_size(config: PreTrainedConfig) -> int:
    """Return the inner size of the widest MLP."""
    found = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(found) if isinstance(found, (list, tuple)) else int(found)


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest context. Raises CannotRunError where the config names none."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    raise CannotRunError("its config.json names no max_position_embeddings.")


def eos_token_ids(model_id: str, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids that end an answer, the class's own default among them."""
    return merged_ids(getattr(config, "eos_token_id", None), end_token_ids(model_id))
