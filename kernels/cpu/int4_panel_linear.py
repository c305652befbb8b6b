"""Products of 8-bit rows with weights of 4 bits, compiled (int4.h): weights are read once."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.panel_linear import BYTES_PER_THREAD
from kernels.cpu.product_library import InstructionSet, Int4Struct, Kind, product_support
from kernels.quantised.weight import QuantisedWeight

# Codes are packed in eights along k.
GROUP_MULTIPLE = 8
_KIND = 2  # kInt4 in layer.h


class Int4PanelLinear:
    """`int4_linear_reference` with the same bits; the weight is held in panels only."""

    __slots__ = (
        "_address",
        "_held",
        "_library",
        "_max_threads",
        "_product",
        "in_features",
        "out_features",
    )

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """weight: of 4 bits with scales that bfloat16 holds; default: the best instruction set.

        Raises ValueError for another weight, RuntimeError where the library is not there.
        """
        support = product_support()
        if support.library is None:
            raise RuntimeError(f"panels need the compiled products; products: {support.detail}")
        best = support.library.best_instruction_set(Kind.INT8)
        if instruction_set is not None and not InstructionSet.NONE < instruction_set <= best:
            raise ValueError(f"this processor runs up to {best.name}, not {instruction_set.name}")
        if weight.bits != 4 or weight.zeros is not None or weight.group_size % GROUP_MULTIPLE:
            raise ValueError(
                f"a weight of {weight.bits} bits in groups of {weight.group_size} is not one of 4 "
                f"bits without zero points in groups that {GROUP_MULTIPLE} divides"
            )
        scales = weight.scales.to(torch.bfloat16)
        if not torch.equal(scales.float(), weight.scales):
            raise ValueError("scales of 4-bit weights have to be numbers that bfloat16 holds")
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"shape {list(bias.shape)} is not [{self.out_features}]")
        self._library = support.library
        panels = self._library.pack_int4(weight.codes, scales)
        bias_f32 = None if bias is None else bias.detach().float().contiguous()
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        self._held = (panels, bias_f32)  # the library has addresses only
        self._product = Int4Struct(
            self.out_features,
            self.in_features,
            weight.group_size,
            panels.data_ptr(),
            None if bias_f32 is None else bias_f32.data_ptr(),
            best if instruction_set is None else instruction_set,
        )
        self._address = ctypes.addressof(self._product)

    @property
    def is_packed(self) -> bool:
        """True: no plain copy of the weight is held."""
        return True

    @property
    def compiled(self) -> tuple[int, int, int]:
        """What a compiled layer takes: the kind, the product's address, the most threads."""
        return _KIND, self._address, self._max_threads

    @property
    def packed_bytes(self) -> int:
        """Bytes of the panels, scales included."""
        return self._held[0].numel()

    def __call__(self, x: Tensor) -> Tensor:
        """x: bfloat16 [n, in_features] -> [n, out_features]."""
        if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, not torch.bfloat16 [n, {self.in_features}]"
            )
        y = torch.empty((x.shape[0], self.out_features), dtype=torch.bfloat16)
        if x.shape[0]:
            num_threads = min(torch.get_num_threads(), self._max_threads)
            self._library.multiply_int4(self._address, x.contiguous(), y, num_threads)
        return y
