"""Matrix products on the CPU that read their weights once and keep every row's bits.

Weights are packed once into panels of 32 columns (products.h). 1 to 64 rows are multiplied with a
panel while it is in the cache, and each sum is one chain over k in a fixed order, so a row has the
same bits alone, in any company and with any number of threads.
"""

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu.product_library import (
    InstructionSet,
    Kind,
    ProductLibrary,
    ProductStruct,
    product_support,
)

# A thread more for so many bytes of weights: starting one costs about what reading them does.
BYTES_PER_THREAD = 64 << 10
# 127 * 128 * in_features must stay below 2^31.
INT8_MAX_IN_FEATURES = 1 << 17
PANEL_COLUMNS = 32


def int8_linear_reference(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`x @ (weight * scales).T + bias` with the rows of x rounded to int8, to the bit.

    x: bfloat16 [n, in_features] -> bfloat16 [n, out_features]; weight: int8 [out_features,
    in_features]; scales: float32 [out_features]; bias: [out_features] or None. A row is scaled
    symmetrically by its largest magnitude; one that holds a NaN or an infinity becomes NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    row_scales = largest / 127
    rows = (wide / row_scales).round().nan_to_num(0.0, 0.0, 0.0)
    # Sums of integers are exact in float64; each is rounded to float32 once, and none is -0.
    sums = (rows.double() @ weight.double().T).long().float()
    is_finite = largest.isfinite()
    y = sums * scales * torch.where(is_finite, row_scales, torch.nan)
    if bias is not None:
        y = y + bias.float()
    return y.to(torch.bfloat16)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights to int8: (int8 [out_features, in_features], float32 scales)."""
    wide = weight.float()
    largest = wide.abs().amax(1) if weight.shape[1] else wide.new_zeros(weight.shape[0])
    scales = largest / 127
    rounded = (wide / scales.unsqueeze(1)).round().nan_to_num(0.0)
    return rounded.to(torch.int8), scales


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
        """weight: bfloat16 [out_features, in_features]; instruction_set: default, the best one.

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
        self.out_features, self.in_features = weight.shape
        self._library, instruction_set = _library(kind, instruction_set)
        panels = self._library.pack(kind, weight.contiguous())
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        bias_f32 = None if bias is None else _contiguous_f32(bias, self.out_features)
        scales_f32 = None if scales is None else _contiguous_f32(scales, self.out_features)
        totals = None if scales is None else weight.sum(1, dtype=torch.int32)
        # The library has addresses only: these keep what stands there.
        self._held = (panels, bias_f32, scales_f32, totals)
        self._product = ProductStruct(
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
    def packed_bytes(self) -> int:
        """Bytes of the panels: the weight's own, and what fills up the last panel and step."""
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
            self._library.multiply(self._address, x.contiguous(), y, num_threads)
        return y


class Int8PanelLinear(PanelLinear):
    """`int8_linear_reference` with the same bits; the weight is held in panels only."""

    __slots__ = ()

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """weight: int8 [out_features, in_features]; scales: [out_features], of each output."""
        if weight.dtype != torch.int8:
            raise ValueError(f"a weight of {weight.dtype} is not int8")
        if weight.shape[1] > INT8_MAX_IN_FEATURES:
            raise ValueError(
                f"int8 sums over {weight.shape[1]} inputs could overflow; at most "
                f"{INT8_MAX_IN_FEATURES}"
            )
        self._hold(Kind.INT8, weight, bias, scales, instruction_set)


def _library(
    kind: Kind, instruction_set: InstructionSet | None
) -> tuple[ProductLibrary, InstructionSet]:
    support = product_support()
    if support.library is None:
        raise RuntimeError(f"panels need the compiled products; products: {support.detail}")
    best = support.library.best_instruction_set(kind)
    if instruction_set is None:
        return support.library, best
    if not InstructionSet.NONE < instruction_set <= best:
        raise ValueError(f"this processor runs up to {best.name}, not {instruction_set.name}")
    return support.library, instruction_set


def _contiguous_f32(values: Tensor, length: int) -> Tensor:
    if values.shape != (length,):
        raise ValueError(f"shape {list(values.shape)} is not [{length}]")
    return values.detach().float().contiguous()


def _pointer(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()
