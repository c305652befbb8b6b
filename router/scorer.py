"""The serving side of a trained router: plain arrays in, probabilities out, numpy only.

scikit-learn trains (router/estimator.py); what it learnt is one linear layer a tier, into which the
calibration is folded, so serving needs neither scikit-learn nor pickle. A router is a folder:

- `router.json`: format and version, sizes of the features, heads, threshold, how it was trained;
- `router.safetensors`: `weight` [num_heads, num_features] float32, `bias` [num_heads] float64.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from router.features import FEATURE_VERSION, FeatureConfig, Floats, prompt_features

CONFIG_NAME: Final = "router.json"
WEIGHTS_NAME: Final = "router.safetensors"
FORMAT: Final = "outrider-router"
FORMAT_VERSION: Final = 1
_HEADS: Final = (("weak",), ("weak", "strong"))
_MAX_CONFIG_BYTES: Final = 2**20
_MAX_WEIGHTS_BYTES: Final = 2**26


class RouterFileError(ValueError):
    """The folder does not hold a router that this version can read. The message says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: {why}. A router is the folder that `outrider router train` writes."
        )
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityEstimate:
    """Probabilities that each tier's answer is right. `large`: None if nobody labelled it."""

    small: float
    large: float | None = None

    @property
    def gain(self) -> float:
        """What the large model is expected to add, in [-1, 1]; without its labels it never errs."""
        return (1.0 if self.large is None else self.large) - self.small

    @property
    def quality(self) -> float:
        """How safe the small model's answer is, in [0, 1]: 1 if the large one adds nothing."""
        return min(1.0, 1.0 - self.gain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterScorer:
    """A trained router. `weight`: [num_heads, num_features], `bias`: [num_heads].

    Heads are the small tier's and, if it was labelled, the large tier's. `threshold`: the quality
    from which on the small model answers. `training` is for people and never read back.
    """

    features: FeatureConfig
    weight: Floats
    bias: Floats
    threshold: float
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError if shapes or values cannot be a router's."""
        num_heads = len(self.bias) if self.bias.ndim == 1 else 0
        if num_heads not in (1, 2):
            raise ValueError(f"bias has shape {list(self.bias.shape)}, not [1] or [2]")
        expected = (num_heads, self.features.num_features)
        if self.weight.shape != expected:
            raise ValueError(f"weight has shape {list(self.weight.shape)}, not {list(expected)}")
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise ValueError("weights hold values that are not finite")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]")

    def estimate(self, text: str) -> QualityEstimate:
        """Probabilities for one prompt; a fraction of a millisecond, whatever its length."""
        vector = prompt_features(text, self.features)
        logits = self.weight[:, vector.indices] @ vector.values + self.bias  # [num_heads]
        small, *large = (_sigmoid(logit) for logit in logits.tolist())
        return QualityEstimate(small=small, large=large[0] if large else None)

    def save(self, folder: Path) -> None:
        """Write the two files; the folder is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, NDArray[Any]] = {
            "weight": np.ascontiguousarray(self.weight, dtype=np.float32),
            "bias": np.ascontiguousarray(self.bias, dtype=np.float64),
        }
        weights = save_safetensors(arrays)
        config = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "feature_version": FEATURE_VERSION,
            "features": asdict(self.features),
            "heads": list(_HEADS[len(self.bias) - 1]),
            "threshold": self.threshold,
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "training": dict(self.training),
        }
        (folder / WEIGHTS_NAME).write_bytes(weights)
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a router; raises RouterFileError for anything that is not one."""
        config = _read_config(folder / CONFIG_NAME)
        weight, bias = _read_weights(folder / WEIGHTS_NAME, str(config["weights_sha256"]))
        if len(bias) != len(config["heads"]):
            raise RouterFileError(folder, f"{len(bias)} heads in the weights, {config['heads']}")
        try:
            return cls(
                features=_feature_config(config["features"]),
                weight=weight,
                bias=bias,
                threshold=_number(config["threshold"]),
                training=config["training"],
            )
        except (TypeError, ValueError) as error:
            raise RouterFileError(folder, str(error)) from error


def _sigmoid(logit: float) -> float:
    # Both branches keep the exponent negative: exp never overflows.
    if logit >= 0.0:
        return 1.0 / (1.0 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1.0 + grown)


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise RouterFileError(path, f"{size_bytes} bytes, at most {max_bytes} are read")
        return path.read_bytes()
    except OSError as error:
        raise RouterFileError(path, error.strerror or "cannot be read") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read_bytes(path, _MAX_CONFIG_BYTES))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RouterFileError(path, f"not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RouterFileError(path, f'not a router: "format" must be "{FORMAT}"')
    for name, known in (("version", FORMAT_VERSION), ("feature_version", FEATURE_VERSION)):
        if config.get(name) != known:
            raise RouterFileError(path, f"{name} {config.get(name)} is unknown, {known} is read")
    kinds = {"features": dict, "heads": list, "weights_sha256": str, "training": dict}
    for name, kind in kinds.items():
        if not isinstance(config.get(name), kind):
            raise RouterFileError(path, f'"{name}" must be a {kind.__name__}')
    if "threshold" not in config:
        raise RouterFileError(path, '"threshold" is missing')
    if tuple(config["heads"]) not in _HEADS:
        raise RouterFileError(path, f"heads {config['heads']} must be one of {_HEADS}")
    return config


def _read_weights(path: Path, sha256: str) -> tuple[Floats, Floats]:
    content = _read_bytes(path, _MAX_WEIGHTS_BYTES)
    try:
        arrays: dict[str, NDArray[Any]] = load_safetensors(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise RouterFileError(path, f"not safetensors ({error})") from error
    if set(arrays) != {"weight", "bias"}:
        raise RouterFileError(path, f"holds {sorted(arrays)}, not weight and bias")
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float64):
            raise RouterFileError(path, f"{name} is {array.dtype}, not float32 or float64")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RouterFileError(path, f"does not belong to its {CONFIG_NAME} (SHA-256 differs)")
    return arrays["weight"].astype(np.float64), arrays["bias"].astype(np.float64)


def _feature_config(values: Mapping[str, Any]) -> FeatureConfig:
    """Raises ValueError unless names and types are exactly those of FeatureConfig."""
    known = {entry.name: entry.type for entry in fields(FeatureConfig)}
    if set(values) != set(known):
        raise ValueError(f"features must name {sorted(known)}, they name {sorted(values)}")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        number = _number(value)
        if known[name] is int:
            if number != int(number):
                raise ValueError(f"{name}={value} must be a whole number")
            checked[name] = int(number)
        else:
            checked[name] = number
    return FeatureConfig(**checked)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
