"""The decoder of each format."""

from outrider.engine.model.quantised.floats import BlockFp8, CompressedTensors, Mxfp4
from outrider.engine.model.quantised.formats import WeightFormat
from outrider.engine.model.quantised.integers import Awq, Gptq
from outrider.engine.model.quantised.stored import WeightDecoder


def decoder_of(weights: WeightFormat) -> WeightDecoder:
    """Return what decodes a format."""
    match weights.method:
        case "gptq":
            return Gptq(
                bits=weights.bits, zero_offset=weights.zero_offset, group_size=weights.group_size
            )
        case "awq":
            return Awq(group_size=weights.group_size)
        case "fp8":
            return BlockFp8(block=weights.block)
        case "compressed-tensors":
            return CompressedTensors(block=weights.block, group_size=weights.group_size)
        case "mxfp4":
            return Mxfp4()
