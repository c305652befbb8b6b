"""adapter_config.json as PEFT writes it: ranks, scales, and what is refused by name."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.engine.errors import InvalidAdapterError

_MAX_ALPHA: Final = 1e6
_MAX_PATTERNS: Final = 4096
_MAX_PATTERN_CHARS: Final = 200

# Fields that say nothing about what is computed here: the tensors tell which modules are changed.
_IGNORED: Final = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core"),
        *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
        *("runtime_config", "target_modules", "task_type", "use_rslora", "lora_ga_config"),
        "velora_config",
    }
)
# Ways to begin that leave the base as it is; others (pissa, olora, corda ...) change its weights.
_BEGINNINGS: Final = frozenset({"gaussian", "eva", "orthogonal"})
# Plain text, with PEFT's dots: other regular expressions could take any time to match.
_PATTERN: Final = re.compile(r"\^?[A-Za-z0-9_.\\]+\$?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraScales:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    """For modules whose name ends in one of its keys."""
    alpha_pattern: Mapping[str, float]
    """For modules whose name ends in one of its keys."""

    def of(self, module: str) -> tuple[int, float]:
        """Return (rank, scale) of a module, "model.layers.0.self_attn.q_proj".

        Kalajdzievski, 2023, for rank-stabilised ones.
        """
        rank = self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_scales(content: bytes) -> LoraScales:
    """Read a config. Raises InvalidAdapterError for what is no LoRA, or of a kind not run here."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidAdapterError("adapter_config.json is not JSON") from None
    if not isinstance(fields, dict):
        raise InvalidAdapterError("adapter_config.json holds no object")
    check_kind(fields)
    rank_pattern = _pattern(fields, "rank_pattern")
    return LoraScales(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_alpha(fields.get("lora_alpha", 8), "lora_alpha"),
        is_rank_stabilised=fields.get("use_rslora") is True,
        rank_pattern={
            key: _rank(value, f"rank_pattern {key}") for key, value in rank_pattern.items()
        },
        alpha_pattern={
            key: _alpha(value, f"alpha_pattern {key}")
            for key, value in _pattern(fields, "alpha_pattern").items()
        },
    )


def check_kind(fields: dict[str, Any]) -> None:
    """Raise InvalidAdapterError for everything that is more than low-rank products."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapterError(f"peft_type is {_shown(kind)}; only LORA adapters are run")
    if fields.get("bias", "none") != "none":
        raise InvalidAdapterError(
            f"bias is {_shown(fields['bias'])}; adapters that train biases are not run (none is)"
        )
    if fields.get("fan_in_fan_out"):
        raise InvalidAdapterError(
            "fan_in_fan_out is set: the base keeps its weights transposed, which none here does"
        )
    beginning = fields.get("init_lora_weights", True)
    if isinstance(beginning, str) and beginning not in _BEGINNINGS:
        raise InvalidAdapterError(
            f"init_lora_weights is {_shown(beginning)}, which changes the base's weights too; save "
            "it as an ordinary LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    for name, value in fields.items():
        if name not in _IGNORED and value not in (None, False, [], {}):
            raise InvalidAdapterError(
                f"{name[:60]} is {_shown(value)}; adapters with it are not run (DoRA, "
                "modules_to_save, trained tokens and the like are more than low-rank products)"
            )


def _pattern(fields: dict[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise InvalidAdapterError(f"{name} is not an object with up to {_MAX_PATTERNS} fields")
    for key in found:
        if len(key) > _MAX_PATTERN_CHARS or not _PATTERN.fullmatch(key):
            raise InvalidAdapterError(
                f"{name} has the key {_shown(key)}; only modules' names are read, whole or their "
                "ends, not other regular expressions"
            )
    return found


def _matching(pattern: Mapping[str, Any], module: str) -> str:
    """Return the first key that is the module's name or its end, as PEFT finds it; else ""."""
    for key in pattern:
        name = key.removeprefix("^").removesuffix("$").replace("\\", "")
        if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
            return key
    return ""


def _rank(value: object, name: str) -> int:
    from outrider.kernels.layers.lora import MAX_RANK  # torch, which a gateway has not

    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise InvalidAdapterError(f"{name} is {_shown(value)}; ranks from 1 to {MAX_RANK} are run")
    return value


def _alpha(value: object, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MAX_ALPHA:  # type: ignore[arg-type]
        raise InvalidAdapterError(f"{name} is {_shown(value)}, which is no number up to 1e6")
    return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
