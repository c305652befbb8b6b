"""The tensors that hold all cached keys and values of one model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.model.config import HeadShape, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose blocks are numbered alike."""

    tensor: Tensor
    """[layers of the group, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
    scales: Tensor | None
    """float32 [layers of the group, 2, num_blocks, block_size, num_kv_heads] where `is_scaled`."""


class KVCache:
    """Keys and values of `num_blocks` blocks for every layer of a model, zero at first.

    `layers[i]` is (k_cache, v_cache), each [num_blocks, block_size, num_kv_heads, head_dim]. A slot
    is block * block_size + offset. The owners of blocks are the block pool's business.

    With `num_window_blocks`, layers with a window have a group of their own, of so many blocks:
    `window_blocks`, int32 [num_blocks], says which of them each block has (0: none, see
    `outrider.engine.cache.window_blocks`), and `slots_of` turns slots into the group's. `full` and
    `window` are the groups; one of them is None if the model has no such layers or they are not
    apart.

    In float8_e4m3fn each head of a slot has a scale (`outrider.kernels.kv.write_kv`):
    `layer_scales[i]` is (k_scale, v_scale), each [num_blocks, block_size, num_kv_heads]. Otherwise
    both are None.

    Recurrent layers have no keys here: their tensors are empty.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_window_blocks: int | None = None,
    ) -> None:
        """Allocate; raises ValueError for sizes below one."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks} and block_size={block_size} must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = where = torch.device(device)
        is_split = num_window_blocks is not None or config.full_heads is not None
        attention = [layer for layer in config.layers if not layer.is_recurrent]
        is_apart = [is_split and layer.window is not None for layer in attention]

        def group(num_layers: int, blocks: int, heads: HeadShape) -> LayerGroup | None:
            if not num_layers:
                return None
            # Zeros, not garbage: a masked NaN would still poison the weighted sum of values.
            shape = (num_layers, 2, blocks, block_size, heads.num_kv_heads)
            scales = None
            if is_scaled(dtype):
                scales = lazy_zeros(shape, dtype=torch.float32, device=where)
            tensor = lazy_zeros((*shape, heads.head_dim), dtype=dtype, device=where)
            return LayerGroup(tensor=tensor, scales=scales)

        own_blocks = num_blocks if num_window_blocks is None else num_window_blocks
        self.full = group(is_apart.count(False), num_blocks, config.heads(windowed=not is_split))
        self.window = group(is_apart.count(True), own_blocks, config.heads(windowed=True))
        self.window_blocks: Tensor | None = None
        if num_window_blocks is not None and self.window is not None:
            self.window_blocks = torch.zeros(num_blocks, dtype=torch.int32, device=where)
        layers = {False: _layers_of(self.full), True: _layers_of(self.window)}
        found = [next(layers[apart]) for apart in is_apart]
        if config.num_recurrent_layers:
            own = iter(found)
            nothing = (torch.empty(0), torch.empty(0)), (None, None)
            found = [nothing if layer.is_recurrent else next(own) for layer in config.layers]
        self.layers = tuple(caches for caches, _ in found)
        self.layer_scales = tuple(scales for _, scales in found)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups that there are."""
        return tuple(group for group in (self.full, self.window) if group is not None)

    @property
    def size_bytes(self) -> int:
        """Memory of the cache, scales included."""
        return sum(
            group.tensor.nbytes + (0 if group.scales is None else group.scales.nbytes)
            for group in self.groups
        )

    def slots_of(self, slots: Tensor) -> Tensor:
        """Return the window group's slots for slots of the cache, int64 [n]; -1 stays -1."""
        if self.window_blocks is None:
            return slots
        blocks = self.window_blocks.index_select(0, (slots // self.block_size).clamp(min=0))
        own = blocks.to(torch.int64) * self.block_size + slots % self.block_size
        return own.where(slots >= 0, -1)

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, *, block_size: int, dtype: torch.dtype, windowed: bool | None = None
    ) -> int:
        """Memory that one block takes over all layers, scales included.

        `windowed`: over those with a window only, or over those without.
        """
        layers_of = {
            True: sum(layer.window is not None for layer in config.layers),
            False: sum(layer.window is None and not layer.is_recurrent for layer in config.layers),
        }
        scale_bytes = torch.float32.itemsize if is_scaled(dtype) else 0
        total = 0
        for kind in (True, False):
            if windowed in (None, kind):
                heads = config.heads(windowed=kind)
                head_bytes = heads.head_dim * dtype.itemsize + scale_bytes
                total += layers_of[kind] * 2 * heads.num_kv_heads * head_bytes * block_size
        return total


_Caches = tuple[Tensor, Tensor]
_Scales = tuple[Tensor, Tensor] | tuple[None, None]


def _layers_of(group: LayerGroup | None) -> Iterator[tuple[_Caches, _Scales]]:
    """Yield each layer's views of its group: ((keys, values), (their scales))."""
    if group is None:
        return
    for index, layer in enumerate(group.tensor):
        scales: _Scales = (None, None)
        if group.scales is not None:
            scales = (group.scales[index][0], group.scales[index][1])
        yield (layer[0], layer[1]), scales


def is_scaled(dtype: torch.dtype) -> bool:
    """True if a cache of this type holds a scale for each head of a slot."""
    return dtype == torch.float8_e4m3fn


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU, memory becomes resident block by block as it is used.

    torch.zeros writes them all at once, numpy asks the system for zero pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)
