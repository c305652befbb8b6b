"""Parts of specimens: launches for compiling ahead of time (tests/kernels/specimens.py)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64

BLOCK_SIZE = 16
NUM_ROWS = 64
VOCAB_SIZE = 151936


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A call of the launchers of kernels/<stem>.py. `is_long`: only where rare ones are wanted."""

    stem: str
    name: str
    run: Callable[[], object]
    is_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A model's attention. A name for the table, and what constants depend on."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None  # None: as dtype
    has_norm: bool = False
    num_blocks: int = 4096
    is_long: bool = False

    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        size = (self.num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        dtype = self.kv_dtype or self.dtype
        return torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of an fp8 cache."""
        if self.kv_dtype is None:
            return None, None
        size = (self.num_blocks, BLOCK_SIZE, self.num_kv_heads)
        return torch.empty(size), torch.empty(size)


QWEN3_8B = Heads(name="Qwen3-8B", num_query_heads=32, num_kv_heads=8, head_dim=128, has_norm=True)
QWEN3_06B = Heads(
    name="Qwen3-0.6B", num_query_heads=16, num_kv_heads=8, head_dim=128, has_norm=True
)
HEADS = (
    QWEN3_8B,
    QWEN3_06B,
    Heads(
        name="Qwen3-8B, fp8 cache",
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        kv_dtype=FP8,
        has_norm=True,
    ),
    Heads(name="heads of 64", num_query_heads=32, num_kv_heads=8, head_dim=64),
    Heads(name="heads of 96", num_query_heads=32, num_kv_heads=32, head_dim=96, dtype=FP16),
    Heads(name="heads of 256", num_query_heads=16, num_kv_heads=4, head_dim=256),
    Heads(name="float32", num_query_heads=8, num_kv_heads=4, head_dim=64, dtype=FP32),
    Heads(
        name="a cache of 2^31 elements and more",
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_blocks=1 << 18,
        is_long=True,
    ),
    Heads(
        name="float32, heads of 256",
        num_query_heads=8,
        num_kv_heads=4,
        head_dim=256,
        dtype=FP32,
        is_long=True,
    ),
)


def integers(*size: int, dtype: torch.dtype = I64) -> Tensor:
    """A tensor of integers, unwritten."""
    return torch.empty(size, dtype=dtype)
