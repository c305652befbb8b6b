"""All layers of a pass, or the whole of it, in one call of the compiled library (pass.h).

The same functions run in the same order as where a caller runs them one by one, so the bits are the
same. That saves the way through Python between them: a tenth of a large model's pass, and most of a
small one's.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.row_attention import RowKeys
from outrider.kernels.layers.compiled_layer import CompiledLayer
from outrider.kernels.layers.compiled_rows import CompiledNorm
from outrider.kernels.layers.lora import CompiledLoraRows
from outrider.kernels.layers.taps import Taps

# Beyond, Python's share of a pass is nothing, and torch's allocator keeps what a layer works in.
MAX_ROWS: Final = 128
# A last layer of so many rows more than are wanted costs less than the way through Python.
FEW_SPARE_ROWS: Final = 8
_Address = ctypes.c_void_p
_Int32, _Int64 = ctypes.c_int32, ctypes.c_int64


class ModelStruct(ctypes.Structure):
    """The parts of a model that every pass reads (struct Model in pass.h)."""

    _fields_ = (
        ("hidden", _Int64),
        ("vocab_size", _Int64),
        ("embedding", _Address),
        ("norm", _Address),
        ("head", _Address),
        ("head_features", _Int64),
        ("head_threads", _Int64),
        ("layers", _Address),
        ("embedding_scale", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        ("head_kind", _Int32),
    )


class LayerCacheStruct(ctypes.Structure):
    """Where a layer finds its rotation and its cache (struct LayerCache in pass.h)."""

    _fields_ = (
        ("keys", _Address),
        ("values", _Address),
        ("table", _Address),
        ("num_positions", _Int64),
        ("num_slots", _Int64),
        ("has_window", _Int64),
    )


class PassStruct(ctypes.Structure):
    """A pass over rows (struct Pass in pass.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("num_layers", _Int64),
        ("token_ids", _Address),
        ("positions", _Address),
        ("slots", _Address * 2),
        ("attention", _Address * 2),
        ("caches", _Address),
        ("lora", _Address),
        ("logits", _Address),
        ("last_hidden", _Address),
        ("wanted", _Address),
        ("num_wanted", _Int64),
        ("residual", _Address),
        ("update", _Address),
        ("tap_layers", _Address),
        ("num_taps", _Int64),
        ("taps", _Address),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnds:
    """The parts of a model before its layers and behind them."""

    embedding: Tensor
    """bfloat16 [vocab_size, hidden], contiguous."""
    embedding_scale: float
    """The embedding's rows are multiplied by it; a number that bfloat16 has."""
    norm: CompiledNorm
    head: PanelLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What a layer reads and writes: bfloat16 [blocks, block_size, heads, head_dim], contiguous."""

    keys: Tensor
    values: Tensor
    table: Tensor | None
    """The table of its rotation; None for none."""
    has_window: bool


class ModelCaches:
    """The caches of all layers, as the library finds them."""

    __slots__ = ("_held", "address")

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        structs = (LayerCacheStruct * len(caches))()
        for struct, each in zip(structs, caches, strict=True):
            struct.keys, struct.values = each.keys.data_ptr(), each.values.data_ptr()
            struct.table = None if each.table is None else each.table.data_ptr()
            struct.num_positions = 0 if each.table is None else len(each.table)
            struct.num_slots = each.keys.shape[0] * each.keys.shape[1]
            struct.has_window = each.has_window
        self._held = (structs, tuple(caches))
        self.address = ctypes.addressof(structs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """The rows of a pass.

    The second element of a pair belongs to layers with a window, the first to all others.
    """

    positions: Tensor
    """int64 [n], contiguous."""
    slots: tuple[Tensor, Tensor]
    """int64 [n], contiguous."""
    keys: tuple[RowKeys, RowKeys]
    lora: CompiledLoraRows | None = None
    """The rows' adapters; None where no row has one."""

    def struct(self, caches: ModelCaches, num_layers: int, taps: Taps | None = None) -> PassStruct:
        """Return a pass through the first `num_layers` layers; its other fields are 0."""
        struct = PassStruct(
            num_rows=self.positions.shape[0],
            num_layers=num_layers,
            positions=self.positions.data_ptr(),
            caches=caches.address,
            lora=None if self.lora is None else ctypes.addressof(self.lora.struct),
        )
        for kind, (slots, keys) in enumerate(zip(self.slots, self.keys, strict=True)):
            struct.slots[kind] = slots.data_ptr()
            struct.attention[kind] = ctypes.addressof(keys.struct)
        if taps is not None:
            struct.num_taps, struct.tap_layers = len(taps.layers), taps.layers_address
            struct.taps = taps.rows.data_ptr()
        return struct


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePass:
    """What a caller in the library needs to run whole passes itself: addresses and sizes."""

    model: int
    """Of a `ModelStruct`."""
    caches: int
    """Of the layers' `LayerCacheStruct`s."""
    num_layers: int
    num_logits: int
    """Of a row."""
    held: tuple[object, ...]
    """What the addresses lead to."""


class CompiledPass:
    """A model's layers, and its ends where all of it is compiled."""

    def __init__(self, layers: Sequence[CompiledLayer], ends: ModelEnds | None) -> None:
        support = product_support()
        assert support.library is not None, "its layers are compiled"
        self._library, self._instruction_set = support.library, support.instruction_set
        self._ends = ends
        self._num_layers = len(layers)
        addresses = (_Address * len(layers))(*(layer.address for layer in layers))
        struct = ModelStruct(layers=ctypes.addressof(addresses))
        if ends is not None:
            struct.head_kind, struct.head, struct.head_threads = ends.head.compiled
            struct.head_features = ends.head.out_features
            struct.vocab_size, struct.hidden = ends.embedding.shape
            struct.embedding = ends.embedding.data_ptr()
            struct.embedding_scale = ends.embedding_scale
            struct.norm = ends.norm.scaled_weight.data_ptr()
            struct.norm_offset = ends.norm.squared_offset
        # The library has addresses only: these keep what stands there.
        self._held = (struct, addresses, tuple(layers))

    @property
    def is_whole(self) -> bool:
        """True if `run` can be called."""
        return self._ends is not None

    def whole(self, caches: ModelCaches) -> WholePass | None:
        """Return what runs whole passes over these caches; None where the ends are not compiled."""
        if self._ends is None:
            return None
        return WholePass(
            model=ctypes.addressof(self._held[0]),
            caches=caches.address,
            num_layers=self._num_layers,
            num_logits=self._ends.head.out_features,
            held=(self, caches),
        )

    def run_layers(
        self,
        residual: Tensor,
        rows: PassRows,
        caches: ModelCaches,
        *,
        count: int,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the first layers; return what the last of them adds to the residual stream.

        `taps`: the hidden states in front of these layers are written to it.
        `residual`: bfloat16 [n, hidden], contiguous; what the others add is added to it. Raises
        IndexError for a position or slot that does not exist.
        """
        call = rows.struct(caches, count, taps)
        update = torch.empty_like(residual)
        call.residual, call.update = residual.data_ptr(), update.data_ptr()
        self._call(call)
        return update

    def run(
        self,
        token_ids: Tensor,
        rows: PassRows,
        caches: ModelCaches,
        *,
        wanted: Tensor | None,
        logits_out: Tensor | None = None,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run all of it: logits float32 [m, head's features], hidden bfloat16 [m, hidden].

        `token_ids`: int64 [n], contiguous. `wanted`: int64 [m], the rows that get logits, None for
        all. `logits_out`: where the logits are to be written; `taps`: where those of all rows are.
        Raises IndexError for a token, row, position or slot that does not exist.
        """
        ends = self._ends
        assert ends is not None
        call = rows.struct(caches, self._num_layers, taps)
        call.token_ids = token_ids.data_ptr()
        num_wanted = token_ids.shape[0]
        if wanted is not None:
            wanted = wanted.contiguous()
            call.wanted, num_wanted = wanted.data_ptr(), wanted.shape[0]
        logits = logits_out
        if logits is None or not logits.is_contiguous():
            logits = torch.empty((num_wanted, ends.head.out_features), dtype=torch.float32)
        hidden = torch.empty((num_wanted, ends.embedding.shape[1]), dtype=torch.bfloat16)
        call.num_wanted, call.logits = num_wanted, logits.data_ptr()
        call.last_hidden = hidden.data_ptr()
        self._call(call)
        if logits_out is not None and logits_out is not logits:
            logits = logits_out.copy_(logits)
        return logits, hidden

    def _call(self, call: PassStruct) -> None:
        is_right = self._library.run_pass(
            ctypes.addressof(self._held[0]),
            ctypes.addressof(call),
            self._instruction_set,
            torch.get_num_threads(),
        )
        if not is_right:
            raise IndexError("a row's token, its position or its slot in the cache does not exist")
