"""Norms, gates and the placing of heads on the CPU, compiled (rows.h): rows keep their bits.

A row is computed by itself in an order that only its width decides, with every operation rounded
as IEEE 754 has it. So its bits depend neither on the rows beside it nor on threads, and every
instruction set gives the same ones.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import InstructionSet, library_for, product_support
from outrider.kernels.cpu.structs import GateCall, HeadsCall, NormCall
from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import RotaryTable

# Of `enum Activation` in rows.h; the exact GELU is torch's.
ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1}
# A thread more for so many elements: starting one costs about what computing them does.
_ELEMENTS_PER_THREAD: Final = 32 << 10
_HEAD_MULTIPLE: Final = 32


def can_run_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """True if the library is there and computes such rows: bfloat16 on a CPU."""
    return (
        device.type == "cpu" and dtype == torch.bfloat16 and product_support().library is not None
    )


def can_place_heads(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """True if `place_heads` takes such heads."""
    return head_dim % _HEAD_MULTIPLE == 0 and can_run_rows(dtype, device)


class CompiledNorm(RmsNorm):
    """`RmsNorm` of bfloat16 rows: float32 up to the result, which is rounded once."""

    __slots__ = ("_instruction_set", "_library", "squared_offset")

    def __init__(
        self, weight: Tensor, eps: float, *, instruction_set: InstructionSet | None = None
    ) -> None:
        """`weight`, `eps`: as for `RmsNorm`. Raises RuntimeError where the library is not there."""
        super().__init__(weight, eps)
        self._library, self._instruction_set = library_for(instruction_set)
        self.squared_offset = weight.shape[-1] * eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [..., d] -> [..., d], contiguous."""
        if x.stride(-1) != 1 or x.dim() != 2:
            return self._normalise(x.reshape(-1, x.shape[-1]), None).view(x.shape)
        return self._normalise(x, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and normalise the sum. Both: [n, d]."""
        if x.shape != residual.shape or residual.dtype is not torch.bfloat16:
            raise ValueError(f"{list(x.shape)} cannot be added to {list(residual.shape)} here")
        return self._normalise(x, residual)

    def _normalise(self, x: Tensor, residual: Tensor | None) -> Tensor:
        num_rows, width = x.shape
        if x.dtype is not torch.bfloat16 or width != self.scaled_weight.shape[-1]:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, not bfloat16 [n, the weight's]")
        y = torch.empty((num_rows, width), dtype=torch.bfloat16)
        call = NormCall(
            num_rows,
            width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            self.scaled_weight.numel() // max(width, 1),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            self.scaled_weight.data_ptr(),
            y.data_ptr(),
            self.squared_offset,
        )
        self._library.normalise(
            ctypes.addressof(call), self._instruction_set, _num_threads(num_rows * width)
        )
        return y


def gate_rows(
    gate_up: Tensor, activation: Activation, *, instruction_set: InstructionSet | None = None
) -> Tensor:
    """`gated_mul` of bfloat16 rows [n, 2 * d] -> [n, d], rounded once.

    `activation`: one of ACTIVATIONS.
    """
    if gate_up.dtype is not torch.bfloat16 or gate_up.dim() != 2 or gate_up.stride(1) != 1:
        raise ValueError(f"rows of {gate_up.dtype} {list(gate_up.shape)} are not gated here")
    library, instruction_set = library_for(instruction_set)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, width), dtype=torch.bfloat16)
    call = GateCall(
        num_rows,
        width,
        gate_up.stride(0),
        gate_up.data_ptr(),
        y.data_ptr(),
        ACTIVATIONS[activation],
    )
    library.gate(ctypes.addressof(call), instruction_set, _num_threads(num_rows * width))
    return y


def place_heads(  # noqa: PLR0913 - as `rope_write_kv`
    heads: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotary: RotaryTable,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_query_heads: int,
    qk_norm: RmsNorm | None = None,
    instruction_set: InstructionSet | None = None,
) -> Tensor:
    """`outrider.kernels.kv.rope_write_kv.rope_write_kv` in bfloat16: return the query, keep the
    rest.

    `heads`: [n, query, key and value heads, head_dim]; `positions`, `slot_mapping`: int64 [n];
    caches: [blocks, block_size, num_kv_heads, head_dim]. Raises IndexError, before anything is
    written, for a position that the table lacks or a slot outside the cache.
    """
    library, instruction_set = library_for(instruction_set)
    num_rows, num_heads, head_dim = heads.shape
    num_kv_heads = k_cache.shape[2]
    _check_heads(heads, k_cache, v_cache, num_query_heads)
    positions, slot_mapping = positions.contiguous(), slot_mapping.contiguous()
    query = torch.empty((num_rows, num_query_heads, head_dim), dtype=torch.bfloat16)
    table = rotary.table
    call = HeadsCall(
        num_rows,
        num_query_heads,
        num_kv_heads,
        head_dim,
        heads.stride(0),
        heads.data_ptr(),
        positions.data_ptr(),
        len(table),
        table.data_ptr() if rotary.turns else None,
        None if qk_norm is None else qk_norm.scaled_weight.data_ptr(),
        slot_mapping.data_ptr(),
        k_cache.shape[0] * k_cache.shape[1],
        query.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        0.0 if qk_norm is None else head_dim * qk_norm.eps,
    )
    num_threads = _num_threads(num_rows * num_heads * head_dim)
    if not library.place(ctypes.addressof(call), instruction_set, num_threads):
        raise IndexError(
            f"positions reach from 0 to {len(table) - 1}, slots from -1 to "
            f"{k_cache.shape[0] * k_cache.shape[1] - 1}"
        )
    return query


def _check_heads(heads: Tensor, k_cache: Tensor, v_cache: Tensor, num_query_heads: int) -> None:
    head_dim, num_kv_heads = heads.shape[2], k_cache.shape[2]
    if heads.shape[1] != num_query_heads + 2 * num_kv_heads or head_dim % _HEAD_MULTIPLE:
        raise ValueError(f"heads {list(heads.shape)} do not fit caches {list(k_cache.shape)}")
    for part in (heads, k_cache, v_cache):
        if part.dtype is not torch.bfloat16 or part.stride(-1) != 1 or part.shape[-1] != head_dim:
            raise ValueError(f"{part.dtype} {list(part.shape)} is not placed here")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or heads.stride(1) != head_dim:
        raise ValueError("heads of a row and caches have to be contiguous")


def _num_threads(num_elements: int) -> int:
    return min(torch.get_num_threads(), 1 + num_elements // _ELEMENTS_PER_THREAD)
