"""Bits that a number of a quantised checkpoint takes where products hold it as it is stored."""

from pathlib import Path
from typing import Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.gguf.folder import LINK
from outrider.engine.model.gguf.header import TENSOR_TYPES, read_header
from outrider.engine.model.quantised.formats import WeightFormat

_PLAIN_BITS: Final = 16.0
# With a group's share of scales, zero points and minimums, as kernels/cpu/stored.h holds them.
_GGUF_BITS: Final = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 6.0, "Q6_K": 10.0}
_EMBEDDING: Final = "token_embd.weight"
_USUAL_GROUP: Final = 128


def stored_bits(config: ModelConfig) -> float | None:
    """Return them, the mean of all products; None where weights are plain, or are decoded."""
    if config.weight_format is not None:
        return _format_bits(config.weight_format) if config.weight_format.can_stay else None
    file = Path(config.model_id) / LINK
    if not file.is_file():
        return None
    try:
        header = read_header(file)
    except UnsupportedModelError:
        return None
    total = bits = 0.0
    for name, tensor in header.tensors.items():
        if len(tensor.shape) == 2 and name != _EMBEDDING:
            kind = TENSOR_TYPES[tensor.kind].name
            numbers = tensor.shape[0] * tensor.shape[1]
            total += numbers
            bits += numbers * _GGUF_BITS.get(kind, _PLAIN_BITS)
    return bits / total if total else None


def _format_bits(weights: WeightFormat) -> float:
    """Scales have 16 bits, zero points too, those of float8 32 and none."""
    group = weights.group_size or _USUAL_GROUP
    if weights.method == "fp8":
        return 8 + 32 / (weights.block[1] if weights.block else _USUAL_GROUP)
    bits = {"awq": 4, "gptq": weights.bits}.get(weights.method, weights.bits or 8)
    zeros = 0 if weights.method == "compressed-tensors" else 16
    return bits + (16 + zeros) / group if group > 0 else float(bits)
