"""The tensor that holds all cached keys and values of one model."""

import math

import numpy as np
import torch
from torch import Tensor

from engine.model.config import ModelConfig


class KVCache:
    """Keys and values of `num_blocks` blocks for every layer of a model, zero at first.

    `tensor`: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; `layers[i]` is
    (k_cache, v_cache), views of it, each [num_blocks, block_size, num_kv_heads, head_dim].
    A slot is block * block_size + offset. The owners of blocks are the block pool's
    business.

    In float8_e4m3fn each head of a slot has a scale (`kernels.kv.write_kv`): `scales`, float32
    [num_layers, 2, num_blocks, block_size, num_kv_heads], and `layer_scales[i]` is (k_scale,
    v_scale), each [num_blocks, block_size, num_kv_heads]. Otherwise `scales` and both are None.
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
        heads = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads)
        where = torch.device(device)
        self.tensor = _lazy_zeros((*heads, config.head_dim), dtype=dtype, device=where)
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (layer[0], layer[1]) for layer in self.tensor
        )
        self.scales: Tensor | None = None
        self.layer_scales: tuple[tuple[Tensor, Tensor] | tuple[None, None], ...]
        self.layer_scales = ((None, None),) * config.num_layers
        if is_scaled(dtype):
            self.scales = _lazy_zeros(heads, dtype=torch.float32, device=where)
            self.layer_scales = tuple((layer[0], layer[1]) for layer in self.scales)

    @property
    def size_bytes(self) -> int:
        """Memory of the cache, scales included."""
        return self.tensor.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @staticmethod
    def bytes_per_block(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
        """Memory that one block takes over all layers, scales included."""
        head_bytes = config.head_dim * dtype.itemsize
        if is_scaled(dtype):
            head_bytes += torch.float32.itemsize
        return config.num_layers * 2 * config.num_kv_heads * head_bytes * block_size


def is_scaled(dtype: torch.dtype) -> bool:
    """True if a cache of this type holds a scale for each head of a slot."""
    return dtype == torch.float8_e4m3fn


def _lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU, memory becomes resident block by block as it is used.

    torch.zeros writes them all at once, numpy asks the system for zero pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)
