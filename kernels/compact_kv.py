"""Move cached keys and values between slots, across all layers at once."""

from torch import Tensor


def compact_kv(cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy slot `src_slots[i]` to `dst_slots[i]` in every layer, as if all were read first.

    cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; slots:
    [n] int64, block * block_size + offset; sources and destinations may overlap, destinations
    are distinct. Tree verification uses it to move an accepted path next to its prefix.
    """
    if src_slots.numel() == 0:
        return
    slots = cache.view(cache.shape[0] * 2, cache.shape[2] * cache.shape[3], -1)
    slots.index_copy_(1, dst_slots, slots.index_select(1, src_slots))
