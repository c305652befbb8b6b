"""The tensor that holds all cached keys and values of one model."""

import math

import numpy as np
import torch
from torch import Tensor

from engine.model_config import ModelConfig


class KVCache:
    """Keys and values of `num_blocks` blocks for every layer of a model, zero at first.

    `tensor`: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; `layers[i]` is
    (k_cache, v_cache), views of it, each [num_blocks, block_size, num_kv_heads, head_dim].
    A slot is block * block_size + offset. Which block belongs to whom is the block pool's
    business.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate; raises ValueError for sizes below one."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks} and block_size={block_size} must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, not garbage: a masked NaN would still poison the weighted sum of values.
        self.tensor = _lazy_zeros(
            (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=torch.device(device),
        )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (layer[0], layer[1]) for layer in self.tensor
        )

    @property
    def size_bytes(self) -> int:
        """Memory of the cache."""
        return self.tensor.nbytes

    @staticmethod
    def bytes_per_block(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
        """Memory that one block takes over all layers."""
        slot_elements = config.num_layers * 2 * config.num_kv_heads * config.head_dim
        return slot_elements * block_size * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU, memory becomes resident block by block as it is used.

    torch.zeros writes them all at once, numpy asks the system for zero pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)
