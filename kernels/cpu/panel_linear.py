"""Matrix products on the CPU that read their weights once and keep every row's bits.

Weights are packed once into panels of 32 columns (products.h). 1 to 64 rows are multiplied with a
panel while it is in the cache. Each sum is one chain over k in a fixed order. So a row has the same
bits alone, in any batch and with any number of threads.
"""

import ctypes
import functools

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import (
    InstructionSet,
    Kind,
    library_for,
    product_support,
)
from outrider.kernels.cpu.structs import ProductStruct
from outrider.kernels.quantised.weight import QuantisedWeight

# A thread more for so many bytes of weights: starting one costs about what reading them does.
BYTES_PER_THREAD = 64 << 10
# 127 * 128 * in_features must stay below 2^31.
INT8_MAX_IN_FEATURES = 1 << 17
PANEL_COLUMNS = 32
# Totals of codes are added over so many at a time.
_NUMBERS_AT_ONCE = 1 << 20


def can_use_panels(weight: Tensor) -> bool:
    """True if the library is there and holds such weights: bfloat16 on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.numel() > 0
        and product_support().library is not None
    )


@functools.cache
def prefers_onednn() -> bool:
    """True if the processor has tiles (AMX), which make many rows cheap and panels do not use."""
    library = product_support().library
    return library is not None and library.has_matrix_tiles


class PanelLinear:
    """`x @ weight.T + bias` in bfloat16, summed in float32; the weight is held in panels only."""

    __slots__ = (
        "_address",
        "_held",
        "_kind",
        "_library",
        "_max_threads",
        "_product",
        "in_features",
        "out_features",
    )

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`weight`: bfloat16 [out_features, in_features]; `instruction_set`: default, the best one.

        Raises RuntimeError where the library is not there; `can_use_panels` says so before.
        """
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"a weight of {weight.dtype} cannot be held in panels; bfloat16 can")
        self._hold(Kind.BFLOAT16, weight, bias, None, instruction_set)

    def _hold(
        self,
        kind: Kind,
        weight: Tensor,
        bias: Tensor | None,
        scales: Tensor | None,
        instruction_set: InstructionSet | None,
    ) -> None:
        self._kind = kind
        self.out_features, self.in_features = weight.shape
        self._library, instruction_set = library_for(instruction_set)
        panels = self._library.pack(kind, weight.contiguous())
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        bias_f32 = None if bias is None else contiguous_f32(bias, self.out_features)
        scales_f32 = None if scales is None else contiguous_f32(scales, self.out_features)
        totals = None if scales is None else _row_totals(weight)
        # The library has addresses only: these keep what stands there.
        self._held = (panels, bias_f32, scales_f32, totals)
        self._product: ctypes.Structure = ProductStruct(
            out_features=self.out_features,
            in_features=self.in_features,
            panels=panels.data_ptr(),
            bias=_pointer(bias_f32),
            scales=_pointer(scales_f32),
            totals=_pointer(totals),
            kind=kind,
            instruction_set=instruction_set,
        )
        self._address = ctypes.addressof(self._product)

    @property
    def is_packed(self) -> bool:
        """True: no plain copy of the weight is held."""
        return True

    @property
    def compiled(self) -> tuple[int, int, int]:
        """Return what a compiled layer takes: the kind, the product's address, the most threads."""
        return self._kind, self._address, self._max_threads

    @property
    def packed_bytes(self) -> int:
        """Bytes of the panels: the weight's own, and what fills up the last panel and step."""
        return self._held[0].numel()

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [n, in_features] -> [n, out_features]."""
        if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, not torch.bfloat16 [n, {self.in_features}]"
            )
        y = torch.empty((x.shape[0], self.out_features), dtype=torch.bfloat16)
        if x.shape[0]:
            self._multiply(x.contiguous(), y, min(torch.get_num_threads(), self._max_threads))
        return y

    def _multiply(self, x: Tensor, y: Tensor, num_threads: int) -> None:
        self._library.multiply(self._address, x, y, num_threads)


class Int8PanelLinear(PanelLinear):
    """`int8_linear_reference` with the same bits; the weight is held in panels only."""

    __slots__ = ()

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`weight`: of 8 bits, one scale for each output. Raises ValueError for another."""
        _out_features, in_features = weight.shape
        if weight.bits != 8 or weight.zeros is not None or weight.group_size < in_features:
            raise ValueError(
                f"a weight of {weight.bits} bits in groups of {weight.group_size} is not one of 8 "
                "bits with a scale for each output"
            )
        if in_features > INT8_MAX_IN_FEATURES:
            raise ValueError(
                f"int8 sums over {in_features} inputs could overflow; at most "
                f"{INT8_MAX_IN_FEATURES}"
            )
        self._hold(Kind.INT8, weight.codes, bias, weight.scales.flatten(), instruction_set)


def contiguous_f32(values: Tensor, length: int) -> Tensor:
    """Return numbers as the library reads them. Raises ValueError for another shape than length."""
    if values.shape != (length,):
        raise ValueError(f"shape {list(values.shape)} is not [{length}]")
    return values.detach().float().contiguous()


def _row_totals(codes: Tensor) -> Tensor:
    """Return the sum of each row, int32 [n], of codes, int8 [n, width].

    In blocks of rows: torch makes all that it adds as wide as the sum first.
    """
    rows_at_once = max(_NUMBERS_AT_ONCE // max(codes.shape[1], 1), 1)
    blocks = torch.split(codes, rows_at_once)
    return torch.cat([block.sum(1, dtype=torch.int32) for block in blocks])


def _pointer(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()
