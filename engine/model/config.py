"""The settings of a checkpoint, read from Hugging Face's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from engine.errors import UnsupportedModelError
from engine.model.checkpoint_files import generation_eos, read_object
from kernels.layers.rope import ROPE_TYPES, RopeConfig

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_SUPPORTED = (
    f"Supported are {', '.join(SUPPORTED_ARCHITECTURES)} with unquantised safetensors weights "
    "(bfloat16, float16 or float32)."
)

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
_MODEL_TYPES: Final = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family decoder.

    `sliding_windows[i]` is layer i's attention window in tokens, None for full attention;
    `sliding_window` is the one window size in use, if any. `dtype` is the checkpoint's own
    ("bfloat16", "float16" or "float32"). `model_id` is the folder or hub id it was read from.
    """

    model_id: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for shapes that make no sense."""
        if self.num_query_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.model_id}: {self.num_query_heads} query heads cannot be shared out over "
                f"{self.num_kv_heads} key-value heads."
            )

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None where all layers see everything."""
        return next((window for window in self.sliding_windows if window is not None), None)

    @property
    def has_mixed_windows(self) -> bool:
        """True if some layers have a window and others have none."""
        return len(set(self.sliding_windows)) > 1

    @classmethod
    def from_hf(cls, path_or_id: str | Path) -> "ModelConfig":
        """Read config.json (and generation_config.json) of a local folder or a hub id.

        Raises UnsupportedModelError if there is no checkpoint, or none that the engine runs.
        """
        model_id = str(path_or_id)
        raw = _raw_config(model_id)
        _refuse_unsupported(model_id, raw)
        config = SimpleNamespace(**raw) if _is_complete(raw) else _transformers_config(model_id)
        return _from_config(model_id, raw["architectures"][0], config)


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
    """Return whether transformers would add nothing to a config that `_from_config` reads.

    It takes transformers 2 seconds to be imported, and its configurations fill in the defaults of
    an architecture, convert what older versions wrote, and refuse values that make no sense.
    """
    return (
        raw.get("model_type") == _MODEL_TYPES.get(raw["architectures"][0], "")
        and not raw.get("use_sliding_window")
        and all(type(raw.get(name, ...)) in types for name, types in _NAMED.items())
        and not raw["hidden_size"] % raw["num_attention_heads"]
        and not {"rope_theta", "rope_scaling"} & raw.keys()
        and {"rope_type", "rope_theta"} <= raw["rope_parameters"].keys()
        and raw["rope_parameters"]["rope_type"] == "default"
    )


def _transformers_config(model_id: str) -> Any:
    """Read config.json with the defaults of its architecture."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_id)
    except (OSError, ValueError, KeyError) as error:
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


def _refuse_unsupported(model_id: str, raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if not architectures or architectures[0] not in SUPPORTED_ARCHITECTURES:
        name = ", ".join(architectures) or f"of type {raw.get('model_type', 'unknown')}"
        raise UnsupportedModelError(
            f"{model_id} is {name}, which the engine cannot run. {_SUPPORTED}"
        )
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") or quantization.get("format") or "unknown"
        raise UnsupportedModelError(
            f"{model_id} is quantised ({method}), which the engine cannot run. {_SUPPORTED}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{model_id} uses the activation {activation!r}; the engine has silu only."
        )


def _from_config(model_id: str, architecture: str, config: Any) -> ModelConfig:
    llama_or_qwen3 = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = bool(getattr(config, "attention_bias", False)) and llama_or_qwen3
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return ModelConfig(
        model_id=model_id,
        architecture=architecture,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope_config(model_id, config, head_dim),
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(config.tie_word_embeddings),
        sliding_windows=_sliding_windows(architecture, config),
        bos_token_id=config.bos_token_id,
        eos_token_ids=_eos_token_ids(model_id, config),
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else "float32",
    )


def _rope_config(model_id: str, config: Any, head_dim: int) -> RopeConfig:
    """Transformers 5 keeps everything in rope_parameters, 4 in rope_scaling and rope_theta."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters or getattr(config, "rope_scaling", None) or {}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{model_id} uses rotary embeddings of type {rope_type!r} "
            f"(partial factor {parameters.get('partial_rotary_factor', 1.0)}); the engine has "
            f"{', '.join(ROPE_TYPES)}, over whole heads."
        )
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return RopeConfig(
        head_dim=head_dim,
        theta=float(theta),
        rope_type=rope_type,
        factor=float(parameters.get("factor") or 1.0),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_positions=int(
            parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        ),
    )


def _sliding_windows(architecture: str, config: Any) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not getattr(config, "use_sliding_window", False):
        return (None,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _eos_token_ids(model_id: str, config: Any) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, which chat models extend."""
    found: list[int] = []
    for source in (config.eos_token_id, generation_eos(model_id)):
        ids = source if isinstance(source, (list, tuple)) else [source]
        found.extend(token_id for token_id in ids if token_id is not None)
    return tuple(dict.fromkeys(found))
