"""Read a checkpoint's config.json into the description of its model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import read_object
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.families.source import ConfigSource
from outrider.engine.model.families.table import FAMILIES
from outrider.engine.model.families.text_parts import family_of_text, text_config
from outrider.engine.model.quantised.formats import METHODS, WeightFormat, weight_format

# With all of these, a config.json leaves nothing to a default of its architecture.
_NAMED: Final[Mapping[str, tuple[type, ...]]] = {
    "hidden_size": (int,),
    "num_hidden_layers": (int,),
    "num_attention_heads": (int,),
    "num_key_value_heads": (int,),
    "head_dim": (int,),
    "intermediate_size": (int,),
    "vocab_size": (int,),
    "rms_norm_eps": (float,),
    "max_position_embeddings": (int,),
    "tie_word_embeddings": (bool,),
    "rope_parameters": (dict,),
    "bos_token_id": (int, type(None)),
    "eos_token_id": (int, list, type(None)),
}
_SUPPORTED: Final = (
    f"Supported are {', '.join(FAMILIES)}, and through transformers most of its other decoders, "
    "with safetensors weights in bfloat16, float16 or float32; quantised ones "
    f"({', '.join(METHODS)}) for the former."
)
_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_MAX_LAYERS: Final = 1000
"""Far above any model's: what reads a config makes something of each layer."""
_WRONG_VALUES: Final = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Errors of computing with values of a wrong type or size, which a broken config.json may hold."""
_MODEL_TYPES: Final = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_model_config(path_or_id: str | Path) -> ModelConfig:
    """Read config.json (and generation_config.json) of a local folder or a hub id.

    Raises UnsupportedModelError if there is no checkpoint, or none that the engine runs.
    """
    model_id = str(path_or_id)
    raw = _raw_config(model_id)
    _refuse_unsupported(model_id, raw)
    architecture = raw["architectures"][0]
    quantised = _weight_format(model_id, raw)
    if (family := family_of_text(architecture, raw)) is not None:
        described = describe(model_id, family, text_config(_transformers_config(model_id)))
        return replace(
            described, architecture=architecture, is_text_part=True, weight_format=quantised
        )
    if architecture not in FAMILIES:
        if quantised is not None:
            raise UnsupportedModelError(
                f"{model_id} is quantised ({quantised.method}), and {architecture} would run "
                f"through transformers, where only unquantised weights do. {_SUPPORTED}"
            )
        from outrider.engine.model.transformers_probe import describe_by_probe

        return describe_by_probe(model_id, raw)
    has_part = isinstance(raw.get("text_config"), dict)
    is_enough = _is_complete(raw) and not has_part
    config = SimpleNamespace(**raw) if is_enough else _transformers_config(model_id)
    # A type that takes images makes a config of it, another one leaves it as it stands.
    if has_part and not isinstance(getattr(config, "text_config", None), dict):
        config = text_config(config)
    return replace(describe(model_id, architecture, config), weight_format=quantised)


def describe(model_id: str, architecture: str, config: Any) -> ModelConfig:
    """Return the description of a config whose defaults are filled in. Raises as above."""
    source = ConfigSource(model_id=model_id, architecture=architecture, config=config)
    try:
        return FAMILIES[architecture](source)
    except _WRONG_VALUES as error:
        raise UnsupportedModelError(f"{model_id}: config.json: {error}") from error


def _raw_config(model_id: str) -> dict[str, Any]:
    """Read config.json as it stands."""
    folder = Path(model_id).expanduser()
    if folder.exists() and not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"{model_id} is not a checkpoint: it has no config.json. Give a folder with "
            "config.json, *.safetensors and a tokenizer, or a Hugging Face id."
        )
    found = read_object(folder / "config.json")
    return _raw_transformers_config(model_id) if found is None else found


def _is_complete(raw: Mapping[str, Any]) -> bool:
    """Return whether transformers would add nothing to a config that `describe` reads.

    It takes transformers 2 seconds to be imported, and its configurations fill in the defaults of
    an architecture, convert what older versions wrote, and refuse values that make no sense.
    """
    return (
        raw.get("model_type") == _MODEL_TYPES.get(raw["architectures"][0], "")
        and not raw.get("use_sliding_window")
        and all(type(raw.get(name, ...)) in types for name, types in _NAMED.items())
        and raw["num_attention_heads"] > 0
        and not raw["hidden_size"] % raw["num_attention_heads"]
        and not {"rope_theta", "rope_scaling"} & raw.keys()
        and {"rope_type", "rope_theta"} <= raw["rope_parameters"].keys()
        and raw["rope_parameters"]["rope_type"] == "default"
    )


def _transformers_config(model_id: str) -> Any:
    """Read config.json with the defaults of its architecture."""
    from transformers import AutoConfig

    try:
        # Otherwise it would ask on a terminal for leave to run the checkpoint's code.
        return AutoConfig.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:  # each configuration of transformers has checks of its own
        raise UnsupportedModelError(f"{model_id}: config.json is broken: {error}") from error


def _raw_transformers_config(model_id: str) -> dict[str, Any]:
    """Fetch config.json from the hub, or say what is wrong with it."""
    from transformers import PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(model_id)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model_id} is neither a local folder nor a checkpoint that could be fetched from "
            f"the Hugging Face hub: {error}"
        ) from error
    return dict(raw)


def _weight_format(model_id: str, raw: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of quantised weights; None for plain ones."""
    text = raw.get("text_config")
    parts = [raw, text] if isinstance(text, dict) else [raw]
    found = [part.get("quantization_config") or part.get("compression_config") for part in parts]
    options = next((each for each in found if each), None)
    if options is None:
        return None
    try:
        return weight_format(options if isinstance(options, dict) else {})
    except ValueError as error:
        method = options.get("quant_method", "unknown") if isinstance(options, dict) else "unknown"
        raise UnsupportedModelError(f"{model_id} is quantised ({method}): {error}") from error


def _refuse_unsupported(model_id: str, raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not (
        architectures and isinstance(architectures[0], str)
    ):
        raise UnsupportedModelError(
            f"{model_id} is of type {raw.get('model_type', 'unknown')}, without architectures in "
            f"config.json, which the engine cannot run. {_SUPPORTED}"
        )
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for name in _LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int) and count > _MAX_LAYERS:
                raise UnsupportedModelError(
                    f"{model_id}: config.json has {name} = {count}; at most {_MAX_LAYERS} layers "
                    "can be read."
                )
