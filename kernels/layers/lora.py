"""Low-rank products that are added to projections, each row by its own adapter.

Hu et al., 2021 ("LoRA"); gathered for rows of many adapters in one call as in Chen et al., 2023
("Punica"). Sums are float32; the projection is rounded once more when they are added. A row is
computed by itself, so its bits do not depend on the rows beside it.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Protocol

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.structs import LoraPartStruct, LoraRowsStruct, LoraSiteStruct
from outrider.kernels.layers.compiled_rows import can_run_rows
from outrider.kernels.triton_support import (
    is_automatic,
    jit,
    launch,
    rounded,
    tl,
    triton,
    uses_triton,
)

MAX_RANK: Final = 256
MAX_PARTS: Final = 3  # queries, keys and values
# Of a part in the table on the device: addresses of a and b, first column, size, rank, scale.
_FIELDS: Final = 6


class Projection(IntEnum):
    """The projections of a layer, numbered as in layer.h; a layer has a site for each."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


def site_of(layer: int, projection: Projection) -> int:
    """Return the number of a layer's projection among all sites of a model."""
    return layer * len(Projection) + projection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPart:
    """One low-rank product: scale * (x @ a.T) @ b is added to columns from `start` on.

    `a` and `b` are contiguous, of one dtype.
    """

    a: Tensor
    """[rank, width of x]."""
    b: Tensor
    """[rank, size], PEFT's B transposed."""
    start: int
    scale: float

    @property
    def end(self) -> int:
        """The first column behind those that it is added to."""
        return self.start + self.b.shape[1]


class LoraWeights:
    """An adapter's products: for each site of the model, up to three parts, often none.

    `digest`: of all that makes its sums; adapters of one digest give the same ones.
    """

    def __init__(self, sites: Sequence[Sequence[LoraPart]], *, digest: str) -> None:
        self.digest = digest
        self.sites = tuple(tuple(parts) for parts in sites)
        parts = [part for site in self.sites for part in site]
        if not parts:
            raise ValueError("an adapter without any product")
        self.device, self.dtype = parts[0].a.device, parts[0].a.dtype
        self.max_rank = max(part.a.shape[0] for part in parts)
        self.max_size = max(part.b.shape[1] for part in parts)
        self.num_bytes = sum(part.a.nbytes + part.b.nbytes for part in parts)

    def to(self, device: torch.device) -> "LoraWeights":
        """Return the same products on a device."""
        sites = [
            [replace(part, a=part.a.to(device), b=part.b.to(device)) for part in parts]
            for parts in self.sites
        ]
        return LoraWeights(sites, digest=self.digest)

    @functools.cached_property
    def table(self) -> Tensor:
        """int64 [sites, MAX_PARTS, _FIELDS] on the device; a rank of 0 for no part."""
        table = torch.zeros((len(self.sites), MAX_PARTS, _FIELDS), dtype=torch.int64)
        for site, parts in enumerate(self.sites):
            for number, part in enumerate(parts):
                scale = torch.tensor(part.scale, dtype=torch.float32).view(torch.int32)
                rank, size = part.b.shape
                fields = (part.a.data_ptr(), part.b.data_ptr(), part.start, size, rank, int(scale))
                table[site, number] = torch.tensor(fields, dtype=torch.int64)
        return table.to(self.device)

    @functools.cached_property
    def compiled(self) -> "ctypes.Array[LoraSiteStruct]":
        """The sites as the compiled library reads them."""
        sites = (LoraSiteStruct * len(self.sites))()
        for own, parts in zip(sites, self.sites, strict=True):
            structs = (LoraPartStruct * len(parts))(
                *(
                    LoraPartStruct(
                        part.a.data_ptr(),
                        part.b.data_ptr(),
                        part.start,
                        part.b.shape[1],
                        part.a.shape[0],
                        part.scale,
                    )
                    for part in parts
                )
            )
            self._structs.append(structs)  # the library has addresses only
            own.parts, own.num_parts = ctypes.addressof(structs), len(parts)
        return sites

    @functools.cached_property
    def _structs(self) -> list[object]:
        return []


# ---- reference ----------------------------------------------------------------------------


def add_lora_reference(x: Tensor, y: Tensor, parts: Sequence[LoraPart], rows: Tensor) -> None:
    """Add one adapter's parts to `rows` (int64) of y, in place.

    `x`: [n, width]; `y`: [n, columns] of the same dtype.
    """
    inputs = x.index_select(0, rows).float()
    for part in parts:
        inner = (inputs @ part.a.float().T) * part.scale  # [len(rows), rank]
        columns = y[:, part.start : part.end]
        sums = columns.index_select(0, rows).float() + inner @ part.b.float()
        columns.index_copy_(0, rows, sums.to(y.dtype))


# ---- Triton -------------------------------------------------------------------------------


@jit
def _shrink_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    x,
    row_slots,
    tables,
    inner,
    site,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (row, part, block of ranks): scale * (x @ a.T) of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(row_slots + row)
    if slot >= 0:
        table = tl.load(tables + slot).to(tl.pointer_type(tl.int64))
        fields = table + (site.to(tl.int64) * PARTS + part) * FIELDS
        rank = tl.load(fields + 4)
        ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.program_id(2) * BLOCK_R < rank:
            a = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty))
            k = tl.arange(0, BLOCK_K)
            sums = tl.zeros((BLOCK_R,), dtype=tl.float32)
            for start in range(0, WIDTH, BLOCK_K):
                is_k = start + k < WIDTH
                left = tl.load(x + row * WIDTH + start + k, mask=is_k, other=0.0).to(tl.float32)
                right = tl.load(
                    a + ranks[:, None] * WIDTH + start + k[None, :],
                    mask=(ranks < rank)[:, None] & is_k[None, :],
                    other=0.0,
                ).to(tl.float32)
                sums += tl.sum(left[None, :] * right, axis=1)
            scale = tl.load(fields + 5).to(tl.int32).to(tl.float32, bitcast=True)
            place = inner + (row * PARTS + part) * INNER + ranks
            tl.store(place, sums * scale, mask=ranks < rank)


@jit
def _expand_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel's arguments
    y,
    row_slots,
    tables,
    inner,
    site,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (row, part, block of columns): adds inner @ b to the columns of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(row_slots + row)
    if slot >= 0:
        table = tl.load(tables + slot).to(tl.pointer_type(tl.int64))
        fields = table + (site.to(tl.int64) * PARTS + part) * FIELDS
        size, rank = tl.load(fields + 3), tl.load(fields + 4)
        columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
        if (rank > 0) & (tl.program_id(2) * BLOCK_N < size):
            b = tl.load(fields + 1).to(tl.pointer_type(y.dtype.element_ty))
            is_column = columns < size
            sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
            for start in range(0, rank, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                left = tl.load(
                    inner + (row * PARTS + part) * INNER + ranks, mask=ranks < rank, other=0.0
                )
                right = tl.load(
                    b + ranks[:, None] * size + columns[None, :],
                    mask=(ranks < rank)[:, None] & is_column[None, :],
                    other=0.0,
                ).to(tl.float32)
                sums += tl.sum(left[:, None] * right, axis=0)
            place = y + row * COLUMNS + tl.load(fields + 2) + columns
            sums += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
            tl.store(place, rounded(sums, y.dtype.element_ty), mask=is_column)


_BLOCK_R: Final = 16
_BLOCK_K: Final = 128
_BLOCK_N: Final = 128


# ---- launchers ----------------------------------------------------------------------------


class LoraRows(Protocol):
    """The rows of a pass and their adapters; a pass in which no row has one has no `LoraRows`."""

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """Add the adapters' products for a site to y, in place.

        `x`: [n, width]; `y`: [n, columns]; contiguous, of the adapters' dtype.
        """

    def select(self, rows: Tensor) -> "LoraRows":
        """Return some of the rows, by their numbers (int64), as a pass of their own."""


@dataclass(frozen=True, slots=True)
class LayerLora:
    """The rows of a pass on their way through one layer."""

    rows: LoraRows
    layer: int


def project(
    product: Callable[[Tensor], Tensor], x: Tensor, which: Projection, lora: LayerLora | None
) -> Tensor:
    """Return a layer's product of x, [n, columns], with what the rows' adapters add to it."""
    y = product(x)
    if lora is not None:
        lora.rows.add(site_of(lora.layer, which), x, y)
    return y


def gather_lora(
    adapters: Sequence[LoraWeights], slots: Sequence[int], *, deterministic: bool = False
) -> LoraRows | None:
    """Return the rows of a pass with their adapters; None where no row has one.

    `slots`: for each row the number of its adapter in `adapters`, -1 for none. `deterministic`: a
    row's bits do not depend on the other rows (with torch's products they would).
    """
    if not adapters or max(slots, default=-1) < 0:
        return None
    first = adapters[0]
    if uses_triton(first.device):
        return TritonLoraRows(adapters, torch.tensor(slots, dtype=torch.int32))
    if is_automatic() and can_run_rows(first.dtype, first.device):
        return CompiledLoraRows(adapters, slots)
    return TorchLoraRows(adapters, slots, deterministic=deterministic)


class TritonLoraRows:
    """`LoraRows` on a GPU. `row_slots`: int [n], on any device."""

    def __init__(self, adapters: Sequence[LoraWeights], row_slots: Tensor) -> None:
        device = adapters[0].device
        self._adapters = tuple(adapters)
        self._slots = row_slots.to(device, torch.int32, non_blocking=True)
        addresses = [each.table.data_ptr() for each in adapters]
        self._tables = torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
        self._max_rank = max(each.max_rank for each in adapters)
        self._max_size = max(each.max_size for each in adapters)

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """See `LoraRows`."""
        (num_rows, width), columns = x.shape, y.shape[1]
        inner = torch.empty((num_rows, MAX_PARTS, MAX_RANK), device=x.device)
        # The same for every pass: no kernel is compiled because other adapters came.
        shape = {"FIELDS": _FIELDS, "PARTS": MAX_PARTS, "INNER": MAX_RANK, "BLOCK_R": _BLOCK_R}
        launch(
            _shrink_kernel,
            (num_rows, MAX_PARTS, triton.cdiv(self._max_rank, _BLOCK_R)),
            x.contiguous(),
            self._slots,
            self._tables,
            inner,
            site,
            WIDTH=width,
            BLOCK_K=_BLOCK_K,
            **shape,
        )
        launch(
            _expand_kernel,
            (num_rows, MAX_PARTS, triton.cdiv(min(self._max_size, columns), _BLOCK_N)),
            y,
            self._slots,
            self._tables,
            inner,
            site,
            COLUMNS=columns,
            BLOCK_N=_BLOCK_N,
            **shape,
        )

    def select(self, rows: Tensor) -> "TritonLoraRows":
        """See `LoraRows`."""
        return TritonLoraRows(self._adapters, self._slots.index_select(0, rows))


class TorchLoraRows:
    """`LoraRows` by torch's products: float32 and float16 on a CPU, and the reference elsewhere."""

    def __init__(
        self, adapters: Sequence[LoraWeights], slots: Sequence[int], *, deterministic: bool
    ) -> None:
        self._adapters, self._slots = adapters, slots
        self._deterministic = deterministic
        self._groups: list[tuple[LoraWeights, Tensor]] = []
        for weights, rows in _by_adapter(adapters, slots):
            index = torch.tensor(rows, dtype=torch.int64, device=weights.device)
            pieces = torch.split(index, 1) if deterministic else (index,)
            self._groups += [(weights, piece) for piece in pieces]

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """See `LoraRows`."""
        for weights, rows in self._groups:
            if weights.sites[site]:
                add_lora_reference(x, y, weights.sites[site], rows)

    def select(self, rows: Tensor) -> "TorchLoraRows":
        """See `LoraRows`."""
        slots = [self._slots[row] for row in rows.tolist()]
        return TorchLoraRows(self._adapters, slots, deterministic=self._deterministic)


class CompiledLoraRows:
    """`LoraRows` of bfloat16 on a CPU, compiled (lora.h); `struct` is what layers are given."""

    def __init__(self, adapters: Sequence[LoraWeights], slots: Sequence[int]) -> None:
        support = product_support()
        assert support.library is not None, "see can_run_rows"
        self._library, self._instruction_set = support.library, support.instruction_set
        self._adapters, self._slots = adapters, slots
        groups = _by_adapter(adapters, slots)
        sites = (ctypes.c_void_p * len(groups))(
            *(ctypes.addressof(weights.compiled) for weights, _ in groups)
        )
        starts = (ctypes.c_int64 * (len(groups) + 1))()
        for number, (_, rows) in enumerate(groups):
            starts[number + 1] = starts[number] + len(rows)
        numbers = [row for _, own in groups for row in own]
        places = (ctypes.c_int32 * len(numbers))(*numbers)
        self.struct = LoraRowsStruct(
            len(groups), ctypes.addressof(sites), ctypes.addressof(starts), ctypes.addressof(places)
        )
        self._held = (sites, starts, places)

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        """See `LoraRows`. Raises MemoryError."""
        assert x.is_contiguous() and y.is_contiguous()  # noqa: PT018 - one thing
        self._library.add_lora(
            ctypes.addressof(self.struct),
            site,
            x,
            y,
            self._instruction_set,
            torch.get_num_threads(),
        )

    def select(self, rows: Tensor) -> "CompiledLoraRows":
        """See `LoraRows`."""
        return CompiledLoraRows(self._adapters, [self._slots[row] for row in rows.tolist()])


def _by_adapter(
    adapters: Sequence[LoraWeights], slots: Sequence[int]
) -> list[tuple[LoraWeights, list[int]]]:
    """Return the adapters that rows have, each with the numbers of its rows."""
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot >= 0:
            rows.setdefault(slot, []).append(row)
    return [(adapters[slot], own) for slot, own in rows.items()]
