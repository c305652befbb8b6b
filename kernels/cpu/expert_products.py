"""A mixture's experts in one compiled call (experts.h), to the bits of products one by one."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import Kind, product_support

_KINDS: Final = (Kind.BFLOAT16, Kind.INT8, Kind.GROUPED)
_NO_SUCH_EXPERT: Final = -2
_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Experts(ctypes.Structure):
    """What stays (struct Experts in experts.h)."""

    _fields_ = (
        ("num_experts", _Int64),
        ("width", _Int64),
        ("inner", _Int64),
        ("gate_up", _Address),
        ("down", _Address),
        ("gate_up_threads", _Int64),
        ("down_threads", _Int64),
        ("gate_up_kind", _Int32),
        ("down_kind", _Int32),
        ("activation", _Int32),
    )


class _Call(ctypes.Structure):
    """Rows of a pass (struct ExpertsCall in experts.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("num_chosen", _Int64),
        ("x", _Address),
        ("experts", _Address),
        ("weights", _Address),
        ("y", _Address),
    )


class ExpertProducts:
    """All experts of a layer, held in panels."""

    __slots__ = ("_held", "_instruction_set", "_run", "_struct")

    def __init__(
        self, gate_up: Sequence[PanelLinear], down: Sequence[PanelLinear], activation: int
    ) -> None:
        """gate_up, down: each expert's, as `alike_panels` finds them; activation: as in rows.h."""
        support = product_support()
        assert support.library is not None, "panels are compiled"
        self._instruction_set = support.instruction_set
        self._run = support.library.functions.outrider_experts
        self._run.argtypes, self._run.restype = (_Address, _Address, _Int32, _Int32), _Int32
        tables = []
        for side in (gate_up, down):
            addresses = (_Address * len(side))(*[each.compiled[1] for each in side])
            tables.append(addresses)
        self._struct = _Experts(
            num_experts=len(down),
            width=down[0].out_features,
            inner=down[0].in_features,
            gate_up=ctypes.addressof(tables[0]),
            down=ctypes.addressof(tables[1]),
            gate_up_threads=gate_up[0].compiled[2],
            down_threads=down[0].compiled[2],
            gate_up_kind=gate_up[0].compiled[0],
            down_kind=down[0].compiled[0],
            activation=activation,
        )
        # The library has addresses only: these keep what stands there.
        self._held = (tables, tuple(gate_up), tuple(down))

    def __call__(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of each row's experts' results, bfloat16 [n, width].

        `rows`: bfloat16 [n, width]; `experts`: int64 [n, k]; `weights`: float32 [n, k]. Raises
        IndexError for an expert that does not exist.
        """
        struct, shape = self._struct, (len(rows), experts.shape[1])
        if rows.dtype is not torch.bfloat16 or rows.shape[1] != struct.width:
            raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not [n, {struct.width}]")
        if experts.shape != shape or weights.shape != shape or not shape[1]:
            raise ValueError(f"experts {list(experts.shape)} do not fit {len(rows)} rows")
        rows, experts = rows.contiguous(), experts.long().contiguous()
        weights, result = weights.float().contiguous(), torch.empty_like(rows)
        call = _Call(
            *shape, rows.data_ptr(), experts.data_ptr(), weights.data_ptr(), result.data_ptr()
        )
        failed = self._run(
            ctypes.addressof(struct),
            ctypes.addressof(call),
            self._instruction_set,
            torch.get_num_threads(),
        )
        if failed == _NO_SUCH_EXPERT:
            raise IndexError(f"experts are numbered from 0 to {struct.num_experts - 1}")
        if failed:
            raise MemoryError(f"experts of {len(rows)} rows found no memory for them")
        return result


def alike_panels(products: Sequence[object]) -> list[PanelLinear]:
    """Return products that one call can take, or none: in panels, alike in shape and kind."""
    found = [each for each in products if isinstance(each, PanelLinear)]
    alike = {(each.out_features, each.in_features, each.compiled[0]) for each in found}
    is_right = len(found) == len(products) and len(alike) == 1 and found[0].compiled[0] in _KINDS
    return found if is_right else []
