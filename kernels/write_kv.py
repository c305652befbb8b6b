"""Store this step's keys and values in the paged cache."""

from torch import Tensor


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Row i goes to slot `slot_mapping[i]` = block * block_size + offset in the block.

    key, value: [n, num_kv_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], contiguous in their first two dimensions; slot_mapping: [n] int64,
    without repeats. Raises IndexError (CPU) for a slot outside the cache.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
