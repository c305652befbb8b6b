"""Take rows whose content only the device knows into the inputs of a pass.

The host has written the inputs' other parts already: where each sequence's block ids begin, the
block ids, and the rows of sequences it knows. Nothing here waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.tree_bounds import MASK_WORDS
from outrider.kernels.triton_support import jit, launch, tl, uses_triton

_ROWS_PER_PROGRAM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """The inputs of a pass: n rows of `batch` sequences, some of either perhaps padding.

    A row sees the logical slots of its sequence from its begin to its end, and those that its words
    name.
    """

    token_ids: Tensor
    """int64 [n]."""
    positions: Tensor
    """int64 [n]."""
    slots: Tensor
    """int64 [n]; -1 writes nothing."""
    ancestor_words: Tensor
    """int64 [n, 4]; bit j is slot tree_start + j."""
    full_words: Tensor
    """The words for layers without a window; `ancestor_words` itself if no layer has one."""
    row_begins: Tensor
    """int32 [n]."""
    row_ends: Tensor
    """int32 [n]."""
    row_tree_starts: Tensor
    """int32 [n]."""
    row_starts: Tensor
    """int32 [batch]."""
    num_rows: Tensor
    """int32 [batch]."""
    kv_lens: Tensor
    """int32 [batch]."""
    first_keys: Tensor
    """int32 [batch]."""
    tree_starts: Tensor
    """int32 [batch]."""
    block_indptr: Tensor
    """int32 [batch]."""
    block_ids: Tensor
    """int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Rows of token trees on the device: the engine's `DeviceRows` without its views."""

    token_ids: Tensor
    """int64 [n]."""
    positions: Tensor
    """int64 [n]."""
    logical_slots: Tensor
    """int64 [n]."""
    sequence_index: Tensor
    """int64 [n]."""
    ancestor_words: Tensor
    """int64 [n, at most 4]."""
    row_starts: Tensor
    """int32 [num_sequences]."""
    num_rows: Tensor
    """int32 [num_sequences]."""
    tree_starts: Tensor
    """int32 [num_sequences]."""
    kv_lens: Tensor
    """int32 [num_sequences]."""


def stage_rows_reference(
    rows: TreeRows, inputs: PassInputs, *, block_size: int, window: int | None
) -> None:
    """`stage_rows` in plain torch; the specification."""
    num_rows, num_sequences = rows.token_ids.shape[0], rows.row_starts.shape[0]
    is_real = rows.logical_slots >= 0  # [n]
    logical = rows.logical_slots.clamp(min=0)
    first_block = inputs.block_indptr[rows.sequence_index].long()
    block = inputs.block_ids[first_block + logical // block_size].long()
    nothing = torch.zeros_like(logical)
    inputs.token_ids[:num_rows] = torch.where(is_real, rows.token_ids, nothing)
    inputs.positions[:num_rows] = torch.where(is_real, rows.positions, nothing)
    slots = block * block_size + logical % block_size
    inputs.slots[:num_rows] = torch.where(is_real, slots, nothing - 1)

    tree_starts = rows.tree_starts[rows.sequence_index]
    words = torch.zeros((num_rows, MASK_WORDS), dtype=torch.int64, device=logical.device)
    words[:, : rows.ancestor_words.shape[1]] = rows.ancestor_words * is_real[:, None]
    inputs.full_words[:num_rows] = words
    inputs.row_ends[:num_rows] = tree_starts
    inputs.row_tree_starts[:num_rows] = tree_starts
    if window is None:
        inputs.row_begins[:num_rows] = 0
        inputs.first_keys[:num_sequences] = 0
    else:
        begins = (rows.positions - window + 1).clamp(min=0)
        inputs.row_begins[:num_rows] = torch.where(is_real, begins, nothing)
        # Its root stands at the tree's start, so no row of the tree begins before that.
        inputs.first_keys[:num_sequences] = (rows.tree_starts - window + 1).clamp(min=0)
        if inputs.ancestor_words is not inputs.full_words:
            inputs.ancestor_words[:num_rows] = _newest(words, window)
    inputs.row_starts[:num_sequences] = rows.row_starts
    inputs.num_rows[:num_sequences] = rows.num_rows
    inputs.tree_starts[:num_sequences] = rows.tree_starts
    inputs.kv_lens[:num_sequences] = rows.kv_lens


def tree_paths_reference(words: Tensor, tree_starts: Tensor, paths: Tensor) -> None:
    """`tree_paths` in plain torch; the specification."""
    is_set = _bits(words)  # [n, 256]
    place = is_set.cumsum(1) - 1
    paths.fill_(-1)
    row, node = is_set.nonzero(as_tuple=True)
    paths[row, place[row, node]] = (tree_starts[row] + node).to(paths.dtype)


def _bits(words: Tensor) -> Tensor:
    """[n, words] -> bool [n, 64 * words], low bit first."""
    shifts = torch.arange(64, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1).bool()


def _newest(words: Tensor, count: int) -> Tensor:
    """The highest `count` bits of each row's words: the nearest ancestors and the node."""
    is_set = _bits(words)
    num_from_here = is_set.flip(1).cumsum(1).flip(1)  # this bit and those above it
    kept = (is_set & (num_from_here <= count)).view(*words.shape, 64).long()
    return (kept << torch.arange(64, device=words.device)).sum(-1)


@jit
def _newest_of_word(word, num_above, window):  # type: ignore[no-untyped-def]
    """Bits of [n] words that at most `window` bits stand at or above; and the new count."""
    bit = tl.arange(0, 64).to(tl.int64)[None, :]
    is_set = (word[:, None] >> bit) & 1  # [n, 64]
    total = tl.sum(is_set, axis=1)  # [n]
    # bits at or above = all of the word less those strictly below
    num_from_here = total[:, None] - (tl.cumsum(is_set, axis=1) - is_set)
    is_kept = (is_set != 0) & (num_from_here + num_above[:, None] <= window)
    kept = tl.sum(tl.where(is_kept, is_set << bit, 0), axis=1)
    return kept, num_above + total


@jit
def _stage_rows_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - what a pass consists of
    token_ids,
    positions,
    logical_slots,
    sequence_index,
    ancestor_words,
    row_starts,
    num_rows,
    tree_starts,
    kv_lens,
    out_token_ids,
    out_positions,
    out_slots,
    out_words,
    out_full_words,
    out_row_begins,
    out_row_ends,
    out_row_tree_starts,
    out_row_starts,
    out_num_rows,
    out_kv_lens,
    out_first_keys,
    out_tree_starts,
    block_indptr,
    block_ids,
    odd_count,
    odd_num_sequences,
    words_stride,
    block_size,
    window,
    NUM_GIVEN: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TRIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: BLOCK rows, and BLOCK sequences. Their numbers come as `_odd` makes them."""
    count, num_sequences = (odd_count - 3) // 2, (odd_num_sequences - 3) // 2
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    logical = tl.load(logical_slots + row, mask=is_row, other=-1)
    is_real = logical >= 0
    sequence = tl.load(sequence_index + row, mask=is_row, other=0)
    token = tl.load(token_ids + row, mask=is_real, other=0)
    position = tl.load(positions + row, mask=is_real, other=0)
    first_block = tl.load(block_indptr + sequence, mask=is_real, other=0)
    # other=0 keeps a row of padding from reading anywhere
    block = tl.load(block_ids + first_block + logical // block_size, mask=is_real, other=0)
    slot = tl.where(is_real, block.to(tl.int64) * block_size + logical % block_size, -1)
    tl.store(out_token_ids + row, token, mask=is_row)
    tl.store(out_positions + row, position, mask=is_row)
    tl.store(out_slots + row, slot, mask=is_row)

    tree_start = tl.load(tree_starts + sequence, mask=is_row, other=0)
    tl.store(out_row_ends + row, tree_start, mask=is_row)
    tl.store(out_row_tree_starts + row, tree_start, mask=is_row)
    begin = tl.zeros([BLOCK], tl.int32)
    if HAS_WINDOW:
        begin = tl.where(is_real, tl.maximum(position - window + 1, 0), 0).to(tl.int32)
    tl.store(out_row_begins + row, begin, mask=is_row)
    num_above = tl.zeros([BLOCK], tl.int64)
    for number in tl.static_range(NUM_KEPT):
        word_index = NUM_KEPT - 1 - number  # the highest word first
        word = tl.zeros([BLOCK], tl.int64)
        if word_index < NUM_GIVEN:
            word = tl.load(ancestor_words + row * words_stride + word_index, mask=is_real, other=0)
        tl.store(out_full_words + row * NUM_KEPT + word_index, word, mask=is_row)
        if TRIMS:
            word, num_above = _newest_of_word(word, num_above, window)
            tl.store(out_words + row * NUM_KEPT + word_index, word, mask=is_row)

    is_sequence = row < num_sequences
    start = tl.load(tree_starts + row, mask=is_sequence, other=0)
    first_key = tl.zeros([BLOCK], tl.int32)
    if HAS_WINDOW:
        first_key = tl.maximum(start - window + 1, 0)
    tl.store(out_tree_starts + row, start, mask=is_sequence)
    tl.store(out_first_keys + row, first_key, mask=is_sequence)
    first_row = tl.load(row_starts + row, mask=is_sequence, other=0)
    tl.store(out_row_starts + row, first_row, mask=is_sequence)
    own_rows = tl.load(num_rows + row, mask=is_sequence, other=0)
    tl.store(out_num_rows + row, own_rows, mask=is_sequence)
    kv_len = tl.load(kv_lens + row, mask=is_sequence, other=0)
    tl.store(out_kv_lens + row, kv_len, mask=is_sequence)


@jit
def _tree_paths_kernel(  # type: ignore[no-untyped-def]
    words,
    tree_starts,
    paths,
    NUM_KEPT: tl.constexpr,
):
    """A program: the path of one row."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, 64 * NUM_KEPT)
    word = tl.load(words + row * NUM_KEPT + node // 64)  # [256]
    is_set = ((word >> (node % 64).to(tl.int64)) & 1).to(tl.int32)
    before = tl.cumsum(is_set, axis=0) - is_set
    # Where a node is not on the path, its place behind the path's end is filled instead.
    total = tl.sum(is_set, axis=0)
    place = tl.where(is_set != 0, before, total + node - before)
    slot = tl.where(is_set != 0, tl.load(tree_starts + row) + node, -1)
    tl.store(paths + row * (64 * NUM_KEPT) + place, slot)


def _odd(number: int) -> int:
    """The number in a form that is neither 1 nor divisible by 16.

    Triton compiles a kernel anew for numbers that are, which would hold up the first step with such
    a number of rows or sequences.
    """
    return 2 * number + 3


def stage_rows(rows: TreeRows, inputs: PassInputs, *, block_size: int, window: int | None) -> None:
    """Write rows and their sequences to the front of a pass's inputs.

    inputs.block_indptr and block_ids say where the sequences' keys lie. `window`: as of
    `plan_attention`; inputs.ancestor_words must be a tensor of its own where a window is less than
    256, because it leaves out far ancestors. A row whose logical slot is below 0 gets token 0,
    position 0, slot -1 and no ancestors, so nothing that it holds can do harm.
    """
    if not uses_triton(inputs.token_ids):
        stage_rows_reference(rows, inputs, block_size=block_size, window=window)
        return
    count, num_sequences = rows.token_ids.shape[0], rows.row_starts.shape[0]
    most = max(count, num_sequences)
    trims = window is not None and inputs.ancestor_words is not inputs.full_words
    launch(
        _stage_rows_kernel,
        (-(-most // _ROWS_PER_PROGRAM),),
        rows.token_ids,
        rows.positions,
        rows.logical_slots,
        rows.sequence_index,
        rows.ancestor_words,
        rows.row_starts,
        rows.num_rows,
        rows.tree_starts,
        rows.kv_lens,
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.ancestor_words,
        inputs.full_words,
        inputs.row_begins,
        inputs.row_ends,
        inputs.row_tree_starts,
        inputs.row_starts,
        inputs.num_rows,
        inputs.kv_lens,
        inputs.first_keys,
        inputs.tree_starts,
        inputs.block_indptr,
        inputs.block_ids,
        _odd(count),
        _odd(num_sequences),
        rows.ancestor_words.stride(0),
        block_size,
        window or 0,
        num_warps=4 if trims else 1,
        num_stages=1,
        NUM_GIVEN=rows.ancestor_words.shape[1],
        NUM_KEPT=MASK_WORDS,
        HAS_WINDOW=window is not None,
        TRIMS=trims,
        BLOCK=_ROWS_PER_PROGRAM,
    )


def tree_paths(words: Tensor, tree_starts: Tensor, paths: Tensor) -> None:
    """The logical slots of each row's ancestors in ascending order, itself last, then -1.

    `words`: int64 [n, 4]; `tree_starts`: int32 [n]; `paths`: int32 [n, 256], written.
    """
    if not uses_triton(words):
        tree_paths_reference(words, tree_starts, paths)
        return
    launch(
        _tree_paths_kernel,
        (words.shape[0],),
        words,
        tree_starts,
        paths,
        num_warps=1,
        num_stages=1,
        NUM_KEPT=MASK_WORDS,
    )
