"""Products of 8-bit rows with weights of 4 bits, compiled (int4.h): weights are read once."""

import ctypes

import torch
from torch import Tensor

from outrider.kernels.cpu.panel_linear import (
    BYTES_PER_THREAD,
    PanelLinear,
    contiguous_f32,
    library_for,
)
from outrider.kernels.cpu.product_library import InstructionSet, Kind
from outrider.kernels.cpu.structs import Int4Struct
from outrider.kernels.quantised.weight import QuantisedWeight

# Codes are packed in eights along k.
GROUP_MULTIPLE = 8


class Int4PanelLinear(PanelLinear):
    """`int4_linear_reference` with the same bits; the weight is held in panels only."""

    __slots__ = ()

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`weight`: of 4 bits with scales that bfloat16 holds; default: the best instruction set.

        Raises ValueError for another weight, RuntimeError where the library is not there.
        """
        self._kind = Kind.INT4
        self._library, instruction_set = library_for(self._kind, instruction_set)
        if weight.bits != 4 or weight.zeros is not None or weight.group_size % GROUP_MULTIPLE:
            raise ValueError(
                f"a weight of {weight.bits} bits in groups of {weight.group_size} is not one of 4 "
                f"bits without zero points in groups that {GROUP_MULTIPLE} divides"
            )
        scales = weight.scales.to(torch.bfloat16)
        if not torch.equal(scales.float(), weight.scales):
            raise ValueError("scales of 4-bit weights have to be numbers that bfloat16 holds")
        self.out_features, self.in_features = weight.shape
        bias_f32 = None if bias is None else contiguous_f32(bias, self.out_features)
        panels = self._library.pack_int4(weight.codes, scales)
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        self._held = (panels, bias_f32, None, None)  # the library has addresses only
        self._product = Int4Struct(
            self.out_features,
            self.in_features,
            weight.group_size,
            panels.data_ptr(),
            None if bias_f32 is None else bias_f32.data_ptr(),
            instruction_set,
        )
        self._address = ctypes.addressof(self._product)

    def _multiply(self, x: Tensor, y: Tensor, num_threads: int) -> None:
        self._library.multiply_int4(self._address, x, y, num_threads)
