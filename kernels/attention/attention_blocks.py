"""Work of the attention kernels on one block of keys, and on all blocks of a unit of work.

The recurrence is Milakov and Gimelshein's, "Online normalizer calculation for softmax", 2018.
Functions here are parts of kernels/attention/attend_tiles.py's kernels. Two tuples go through them:
`tile` is (query rows [BLOCK_M, BLOCK_D], row_begins, row_ends, rows, which of them there are:
[BLOCK_M] each); `cache` is (keys, values, their scales if there are any: pointers at the head;
elements from slot to slot, scales from slot to slot, factor, inner factor).
"""

from outrider.kernels.triton_support import dot, jit, tl

_NEVER = tl.constexpr(0x7FFFFFFF)


@jit
def _decode(read, like):  # type: ignore[no-untyped-def]
    """e4m3 numbers over 256 from their bytes, in the type of `like`: exact.

    By their bits, because compute capability 8.0 has no instruction for it: sign, exponent and
    mantissa become those of a float16, subnormal numbers too; the exponents' biases are 7 and 15.
    """
    bits = read.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(like.dtype)


@jit
def _named_keys(  # type: ignore[no-untyped-def]
    words, row, is_row, start, NUM_WORDS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[rows, BLOCK_N] bool: whether a row's words have bit start + column; start may be below 0."""
    shifted = tl.maximum(start, -64) + 64
    # The word with bit `start`, -1 if the bits are below the first; -2: a row of padding.
    index = tl.where(is_row, shifted // 64 - 1, -2)
    places = words + row * NUM_WORDS + index
    low = tl.load(places, mask=(index >= 0) & (index < NUM_WORDS), other=0).to(tl.uint64)
    high = tl.load(places + 1, mask=(index >= -1) & (index < NUM_WORDS - 1), other=0)
    shift = (shifted % 64).to(tl.uint64)
    # The 64 bits from `start` on; shifted twice because a shift by 64 is undefined.
    window = (low >> shift) | ((high.to(tl.uint64) << 1) << (63 - shift))
    column = tl.arange(0, BLOCK_N)[None, :]
    bits = window.to(tl.uint32)[:, None]  # in 32 bits: half the registers
    if BLOCK_N > 32:
        bits = tl.where(column < 32, bits, (window >> 32).to(tl.uint32)[:, None])
    return ((bits >> (column % 32).to(tl.uint32)) & 1) != 0


@jit
def _offset(logical, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """logical % BLOCK_SIZE of BLOCK_N consecutive slots from a multiple of BLOCK_N on."""
    if BLOCK_N % BLOCK_SIZE == 0:  # the same for all: nothing to be kept until a block id arrives
        return tl.arange(0, BLOCK_N) % BLOCK_SIZE
    return logical % BLOCK_SIZE


@jit
def _no_keys(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state of rows that have seen no keys: see `_add_keys`."""
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return sums, top, tl.zeros([BLOCK_M], tl.float32)


@jit
def _add_keys(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a step of a loop, with its state
    sums,
    top,
    total,
    query,
    cache,
    slots,
    is_key,
    visible,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Take a block of keys into (sums [BLOCK_M, BLOCK_D], top [BLOCK_M], total [BLOCK_M]).

    The greatest score so far, and the sums of weights and of weighted values relative to it. A row
    that sees none of the keys keeps its state to the bit. Where a product is added to something,
    an explicit fma says so: the compiler shall not decide whether that rounds once or twice.
    """
    keys, values, key_scales, value_scales, stride, scale_stride, factor, inner_factor = cache
    dim = tl.arange(0, BLOCK_D)
    key_places = keys + (slots * stride)[None, :] + dim[:, None]
    value_places = values + (slots * stride)[:, None] + dim[None, :]
    is_dim = dim < HEAD_DIM
    if HAS_MASK:
        key = tl.load(key_places, mask=is_key[None, :] & is_dim[:, None], other=0)
        value = tl.load(value_places, mask=is_key[:, None] & is_dim[None, :], other=0)
    elif BLOCK_D != HEAD_DIM:
        key = tl.load(key_places, mask=is_dim[:, None], other=0)
        value = tl.load(value_places, mask=is_dim[None, :], other=0)
    else:
        key = tl.load(key_places)  # [BLOCK_D, BLOCK_N]
        value = tl.load(value_places)  # [BLOCK_N, BLOCK_D]
    if HAS_SCALES:
        key, value = _decode(key, query), _decode(value, query)
        key_scale = tl.load(key_scales + slots * scale_stride, mask=is_key, other=0.0)
        value_scale = tl.load(value_scales + slots * scale_stride, mask=is_key, other=0.0)
    scores = dot(query, key, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    if HAS_SCALES:
        scores = scores * key_scale[None, :]
    if HAS_SOFTCAP:  # the hyperbolic tangent
        scores = 1.0 - 2.0 / (tl.exp2(scores * inner_factor) + 1.0)
    if HAS_MASK:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)  # inf - inf is not a number
    weights = tl.exp2(tl.fma(scores, factor, -(pivot * factor)[:, None]))
    decay = tl.exp2((top - pivot) * factor)
    total = tl.fma(total, decay, tl.sum(weights, axis=1))
    if HAS_SCALES:  # 256: see _decode
        weights = weights * (value_scale * 256.0)[None, :]
    sums = dot(weights.to(query.dtype), value, sums * decay[:, None])
    return sums, new_top, total


@jit
def attend_in_any_order(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a unit's bounds
    tile,
    cache,
    blocks,
    kv_len,
    low,
    high,
    free_low,
    free_high,
    words,
    tree_start,
    NUM_WORDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """(sums, top, total) over the blocks of keys from `low` to `high`.

    Every row sees all keys of the blocks from `free_low` to `free_high`; those come first.
    """
    query, begin, end, row, is_row = tile
    columns = tl.arange(0, BLOCK_N)
    sums, top, total = _no_keys(BLOCK_M, BLOCK_D)
    for block in tl.range(free_low, free_high):
        logical = block * BLOCK_N + columns
        block_id = tl.load(blocks + logical // BLOCK_SIZE)
        slots = block_id.to(tl.int64) * BLOCK_SIZE + _offset(logical, BLOCK_SIZE, BLOCK_N)
        is_key = columns >= 0
        sums, top, total = _add_keys(
            sums, top, total, query, cache, slots, is_key, is_key,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_SOFTCAP, HAS_SCALES,
        )  # fmt: skip
    num_before = free_low - low
    for step in tl.range(num_before + high - free_high):
        block = tl.where(step < num_before, low + step, free_high + step - num_before)
        logical = block * BLOCK_N + columns
        is_key = logical < kv_len
        start = block * BLOCK_N - tree_start
        visible = (logical[None, :] >= begin[:, None]) & (logical[None, :] < end[:, None])
        visible |= _named_keys(words, row, is_row, start, NUM_WORDS, BLOCK_N)
        visible &= is_key[None, :]
        block_id = tl.load(blocks + logical // BLOCK_SIZE, mask=is_key, other=0)
        slots = block_id.to(tl.int64) * BLOCK_SIZE + _offset(logical, BLOCK_SIZE, BLOCK_N)
        sums, top, total = _add_keys(
            sums, top, total, query, cache, slots, is_key, visible,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_SOFTCAP, HAS_SCALES,
        )  # fmt: skip
    return sums, top, total


@jit
def attend_in_order(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a unit's bounds
    tile,
    cache,
    blocks,
    kv_len,
    low,
    high,
    split_end,
    first_row,
    num_own,
    path_slots,
    max_path,
    tree_start,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """(sums, top, total) over the blocks of positions from `low` to `high`.

    One loop, so that a block passes through the same instructions for a row of a tree as for a
    causal row. First come the blocks whose keys all rows share. Then, row by row (`num_own` from
    `first_row` on), come those from the block in which the tree starts, with the row's ancestors in
    order.
    """
    query, begin, end, row, is_row = tile
    columns = tl.arange(0, BLOCK_N)
    sums, top, total = _no_keys(BLOCK_M, BLOCK_D)
    num_shared = high - low
    own_low = low
    num_own_blocks = 0
    if HAS_PATHS:  # noqa: SIM102 - a constant, no condition of the device
        if tree_start < kv_len:
            tree_block = tree_start // BLOCK_N
            own_high = tree_block + 1  # to the last block that any row's path reaches
            for depth in tl.range((tree_block + 1) * BLOCK_N - tree_start, max_path, BLOCK_N):
                slot = tl.load(path_slots + row * max_path + depth, mask=is_row, other=-1)
                own_high += (tl.max(slot, axis=0) >= 0).to(tl.int32)
            own_low = tl.maximum(tree_block, low)
            num_own_blocks = tl.maximum(tl.minimum(own_high, split_end // BLOCK_N) - own_low, 0)
            num_shared = tl.maximum(tl.minimum(tree_block, high) - low, 0)
    for step in tl.range(num_shared + num_own * num_own_blocks):
        own = tl.maximum(step - num_shared, 0)
        turn = own // tl.maximum(num_own_blocks, 1)
        own_block = own_low + own - turn * num_own_blocks
        block = tl.where(step < num_shared, low + step, own_block)
        own_start = tl.where(step < num_shared, _NEVER, tree_start)
        limit = tl.where(row == first_row + turn, _NEVER, 0)
        limit = tl.where(step < num_shared, end, limit)
        positions = block * BLOCK_N + columns
        logical = positions
        if HAS_PATHS:
            is_ancestor = positions >= own_start
            path = path_slots + (first_row + turn).to(tl.int64) * max_path
            depths = positions - tree_start
            ancestors = tl.load(path + depths, mask=is_ancestor & (depths < max_path), other=-1)
            logical = tl.where(is_ancestor, ancestors, logical)
        is_key = (logical >= 0) & (logical < kv_len)
        positions = tl.where(is_key, positions, _NEVER)[None, :]
        visible = (positions >= begin[:, None]) & (positions < limit[:, None])
        block_id = tl.load(blocks + logical // BLOCK_SIZE, mask=is_key, other=0)
        slots = block_id.to(tl.int64) * BLOCK_SIZE + logical % BLOCK_SIZE
        sums, top, total = _add_keys(
            sums, top, total, query, cache, slots, is_key, visible,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_SOFTCAP, HAS_SCALES,
        )  # fmt: skip
    return sums, top, total
