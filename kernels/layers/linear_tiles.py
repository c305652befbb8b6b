"""Tiles of products on a GPU in which every row keeps its bits."""

import torch

# Weights from this many rows on fill a GPU with the wide tile.
WIDE_MIN_FEATURES = 8192
# Neighbouring programs share weights: so many tiles of rows run before the next weights are read.
GROUP_TILES = 16


def tile_shape(out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks, warps and stages: by the weight alone, never by the number of rows."""
    is_aligned = in_features % 16 == 0  # else loads are narrow, and long blocks spill registers
    if dtype == torch.float32:  # no tensor cores for full precision
        block_m, block_n, block_k = 32, 32 if is_aligned else 16, 32 if is_aligned else 16
    else:
        block_m, block_n = 64, 64 if out_features >= WIDE_MIN_FEATURES else 32
        block_k = 128 if is_aligned else 32
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 4,
        "num_stages": 3,
    }
