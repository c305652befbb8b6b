"""A batch that the host knows, as the arrays of a `TilePlan`."""

from dataclasses import dataclass, fields
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray

from outrider.kernels.arrays import Ints32
from outrider.kernels.attention.attention_plan import AttentionBatch, newest_ancestors
from outrider.kernels.attention.attention_tiles import (
    MAX_SEQUENCES,
    TilePlan,
    TileShape,
    max_tiles_of,
    new_work,
    tile_shape,
    workspace_size,
)
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.triton_support import architecture
from outrider.kernels.upload import upload

# Sequences and steps of paths are padded to a multiple of this: Triton compiles a kernel once more
# for arguments that are no multiple of 16.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Host arrays by the names of `TilePlan`'s tensors, which say what they hold."""

    row_starts: Ints32
    num_rows: Ints32
    kv_lens: Ints32
    first_keys: Ints32
    tree_starts: Ints32
    block_indptr: Ints32
    block_ids: Ints32
    row_begins: Ints32
    row_ends: Ints32
    ancestor_words: NDArray[np.int64]
    path_slots: Ints32 | None


def pack_rows(
    batch: AttentionBatch, *, window: int | None = None, has_paths: bool = False
) -> PackedRows:
    """The arrays of a batch, its sequences padded with empty ones to a multiple of 16.

    `window`: as `plan_attention`'s; `has_paths`: whether trees' `path_slots` are wanted. Raises
    ValueError for more than 1024 sequences or 256 nodes a tree.
    """
    batch_size = len(batch.kv_lens)
    if batch_size > MAX_SEQUENCES:
        raise ValueError(f"{batch_size} sequences in a pass, at most {MAX_SEQUENCES} are supported")
    positions, row_ends, words, path_slots = _pack_visible(batch, window, has_paths)
    row_begins = np.zeros_like(row_ends)
    first_keys = [0] * batch_size
    if window is not None:
        np.maximum(positions - (window - 1), 0, out=row_begins)
        for b, (start, end) in enumerate(pairwise(batch.query_indptr)):
            if end > start:
                first_keys[b] = min(int(row_begins[start:end].min()), batch.tree_starts[b])
    lengths = [len(table) for table in batch.block_tables]
    return PackedRows(
        row_starts=_padded(batch.query_indptr[:-1]),
        num_rows=_padded(np.diff(batch.query_indptr)),
        kv_lens=_padded(batch.kv_lens),
        first_keys=_padded(first_keys),
        tree_starts=_padded(batch.tree_starts),
        block_indptr=_padded(list(accumulate(lengths, initial=0))[:-1]),
        block_ids=np.fromiter(chain.from_iterable(batch.block_tables), np.int32, sum(lengths)),
        row_begins=row_begins,
        row_ends=row_ends,
        ancestor_words=words,
        path_slots=path_slots,
    )


def _padded(values: npt.ArrayLike) -> Ints32:
    """The numbers as int32, and zeros up to a multiple of 16."""
    numbers = np.asarray(values, dtype=np.int32)
    return np.pad(numbers, (0, -len(numbers) % _ALIGNMENT))


def _pack_visible(
    batch: AttentionBatch, window: int | None, has_paths: bool
) -> tuple[Ints32, Ints32, NDArray[np.int64], Ints32 | None]:
    """(positions [n], row_ends [n], ancestor_words [n, 4], path_slots [n, max_path] or None)."""
    total_rows = batch.query_indptr[-1]
    positions = np.zeros(total_rows, dtype=np.int32)
    row_ends = np.zeros(total_rows, dtype=np.int32)
    words = np.zeros((total_rows, MASK_WORDS), dtype=np.int64)
    path_slots = None
    all_masks = [mask for masks in batch.ancestor_masks if masks for mask in masks]
    if has_paths and all_masks:
        max_path = max(mask.bit_count() for mask in all_masks)
        path_slots = np.full((total_rows, -(-max_path // _ALIGNMENT) * _ALIGNMENT), -1, np.int32)
    for b, (start, end) in enumerate(pairwise(batch.query_indptr)):
        masks, kv_len, tree_start = batch.ancestor_masks[b], batch.kv_lens[b], batch.tree_starts[b]
        if masks is None:
            positions[start:end] = np.arange(kv_len - (end - start), kv_len)
            row_ends[start:end] = positions[start:end] + 1
            continue
        if kv_len - tree_start > MAX_TREE_NODES:
            raise ValueError(
                f"a tree of {kv_len - tree_start} nodes, at most {MAX_TREE_NODES} are supported"
            )
        row_ends[start:end] = tree_start
        depths = np.array([mask.bit_count() - 1 for mask in masks], dtype=np.int32)
        positions[start:end] = tree_start + depths
        words[start:end] = _words(masks)
        if path_slots is not None:
            _fill_paths(path_slots[start:end], words[start:end], tree_start)
        if window is not None and len(masks) and depths.max() >= window:
            words[start:end] = _words([newest_ancestors(mask, window) for mask in masks])
    return positions, row_ends, words, path_slots


def plan_tiles(  # noqa: PLR0913 - a step's plan depends on the model's shape
    batch: AttentionBatch,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
    has_full_layers: bool = False,
    deterministic: bool = False,
    dtype: torch.dtype,
    device: torch.device,
    shape: TileShape | None = None,
) -> TilePlan:
    """The plan of a batch, not yet prepared: one copy to the device. `shape`: instead of the best.

    Raises ValueError for more than 1024 sequences or 256 nodes a tree.
    """
    windows = [sliding_window]
    if sliding_window is not None and has_full_layers:
        windows.append(None)
    max_rows = max(np.diff(batch.query_indptr), default=0)
    if shape is None:
        shape = tile_shape(
            max_rows_per_sequence=int(max_rows),
            group_size=num_query_heads // num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            architecture=architecture(device),
            deterministic=deterministic,
        )
    packed = [
        pack_rows(
            batch if window is None else batch.of_window(),
            window=window,
            has_paths=shape.is_deterministic,
        )
        for window in windows
    ]
    max_tiles = max_tiles_of(shape, np.diff(batch.query_indptr))
    max_kv_len = max(batch.kv_lens, default=0)
    workspace = torch.empty(
        workspace_size(
            shape,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=device,
            max_tiles=max_tiles,
            max_kv_len=max_kv_len,
        ),
        dtype=torch.float32,
        device=device,
    )
    plan = None
    for rows in reversed(_upload_all(packed, device)):
        plan = TilePlan(
            **rows,
            work=new_work(len(packed[0].row_starts), device),
            workspace=workspace,
            shape=shape,
            num_kv_heads=num_kv_heads,
            max_tiles=max_tiles,
            may_split=max_kv_len > shape.split_size,
            full=plan,
        )
    assert plan is not None
    return plan


def _upload_all(packed: list[PackedRows], device: torch.device) -> list[dict[str, Any]]:
    """Tensors by name for each, all in one buffer, each of them at a multiple of 64 bytes."""
    arrays = [
        (index, field.name, array)
        for index, rows in enumerate(packed)
        for field in fields(rows)
        if (array := getattr(rows, field.name)) is not None
    ]
    sizes = [-(-array.nbytes // 64) * 16 for _, _, array in arrays]  # in int32
    offsets = list(accumulate(sizes, initial=0))
    buffer = np.zeros(max(offsets[-1], 1), dtype=np.int32)
    for (_, _, array), offset in zip(arrays, offsets, strict=False):
        buffer[offset : offset + array.nbytes // 4] = array.reshape(-1).view(np.int32)
    on_device = upload(buffer, device)
    tensors: list[dict[str, Any]] = [{"path_slots": None} for _ in packed]
    for (index, name, array), offset in zip(arrays, offsets, strict=False):
        part = on_device[offset : offset + array.nbytes // 4]
        if array.dtype == np.int64:
            part = part.view(torch.int64)
        tensors[index][name] = part.view(array.shape)
    return tensors


def _words(masks: list[int]) -> NDArray[np.int64]:
    """[len(masks), 4]: the masks' bits, low word first."""
    packed = b"".join(mask.to_bytes(8 * MASK_WORDS, "little") for mask in masks)
    return np.frombuffer(packed, dtype=np.int64).reshape(len(masks), MASK_WORDS)


def _fill_paths(paths: Ints32, words: NDArray[np.int64], tree_start: int) -> None:
    """Write the slots of each row's set bits, ascending, to the front of its path."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    row, node = bits.nonzero()
    place = bits.cumsum(1, dtype=np.int32)[row, node] - 1
    paths[row, place] = tree_start + node
