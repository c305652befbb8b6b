"""Launches of attention: plan and kernels of every tile shape."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from outrider.kernels.attention.attend_tiles import attend_tiles
from outrider.kernels.attention.attention_tiles import (
    TilePlan,
    max_tiles_of,
    new_work,
    tile_shapes,
    workspace_size,
)
from outrider.kernels.triton_support import architecture
from tests.kernels.specimen import (
    BF16,
    BLOCK_SIZE,
    FP8,
    FP16,
    FP32,
    I32,
    NUM_ROWS,
    QWEN3_06B,
    QWEN3_8B,
    Heads,
    Specimen,
    integers,
)

_LONGEST = 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A pass. variant: which of `tile_shapes`, the smallest first."""

    heads: Heads
    variant: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    is_deterministic: bool = False
    has_trees: bool = True
    batch: int = 32
    num_rows: int = NUM_ROWS

    @property
    def name(self) -> str:
        """For the table."""
        words = [self.heads.name, f"tile {self.variant}"]
        words += ["deterministic"] if self.is_deterministic else []
        words += ["no trees"] if not self.has_trees else []
        words += ["softcap"] if self.softcap is not None else []
        words += ["sinks"] if self.has_sinks else []
        words += [f"{self.num_rows} rows"] if self.num_rows != NUM_ROWS else []
        return ", ".join([*words, f"batch {self.batch}"])

    def run(self) -> None:
        """Plan and attend."""
        heads, batch, device = self.heads, self.batch, torch.device("cpu")
        shape = tile_shapes(
            group_size=heads.num_query_heads // heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=heads.dtype,
            architecture=architecture(device),
            deterministic=self.is_deterministic,
        )[self.variant]
        max_tiles = max_tiles_of(shape, np.full(batch, 8))
        size = workspace_size(
            shape,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            device=device,
            max_tiles=max_tiles,
            max_kv_len=_LONGEST,
        )
        has_paths = self.is_deterministic and self.has_trees
        plan = TilePlan(
            row_starts=integers(batch, dtype=I32),
            num_rows=integers(batch, dtype=I32),
            kv_lens=integers(batch, dtype=I32),
            first_keys=integers(batch, dtype=I32),
            tree_starts=integers(batch, dtype=I32),
            block_indptr=integers(batch, dtype=I32),
            block_ids=integers(4096, dtype=I32),
            row_begins=integers(NUM_ROWS, dtype=I32),
            row_ends=integers(NUM_ROWS, dtype=I32),
            ancestor_words=integers(NUM_ROWS, 4),
            path_slots=integers(NUM_ROWS, 256, dtype=I32) if has_paths else None,
            work=new_work(batch, device),
            workspace=torch.empty(size),
            shape=shape,
            num_kv_heads=heads.num_kv_heads,
            max_tiles=max_tiles,
        )
        plan.prepare()
        k_scale, v_scale = heads.scales()
        # queries as the fused projection has them, or alone
        query = torch.empty(self.num_rows, heads.num_query_heads, heads.head_dim, dtype=heads.dtype)
        attend_tiles(
            query,
            *heads.cache(),
            plan,
            scale=0.1,
            k_scale=k_scale,
            v_scale=v_scale,
            softcap=self.softcap,
            sinks=torch.empty(heads.num_query_heads) if self.has_sinks else None,
        )


def _heads(
    name: str,
    query: int,
    kv: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> Heads:
    return Heads(
        name=name,
        num_query_heads=query,
        num_kv_heads=kv,
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


_FP8_8B = _heads("Qwen3-8B, fp8 cache", 32, 8, 128, BF16, FP8)
_NARROW = _heads("heads of 64", 32, 8, 64, FP16)
_ODD = _heads("heads of 96", 32, 32, 96, BF16)
_WIDE = _heads("heads of 256", 16, 8, 256, BF16)
_WIDE_FP8 = _heads("heads of 256, fp8 cache", 16, 8, 256, BF16, FP8)
_FULL = _heads("float32", 16, 8, 128, FP32)
_WIDE_FULL = _heads("float32, heads of 256", 8, 4, 256, FP32)
_HUGE = Heads(
    name="a cache of 2^31 elements",
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_blocks=(1 << 31) // (BLOCK_SIZE * 8 * 128),
)

_GPT_OSS = _heads("gpt-oss", 64, 8, 64, BF16)

_COMMON = (
    *(_Pass(heads=QWEN3_8B, variant=variant) for variant in range(3)),
    *(_Pass(heads=QWEN3_8B, variant=variant, num_rows=16) for variant in range(2)),
    _Pass(heads=QWEN3_8B, is_deterministic=True),
    _Pass(heads=_FP8_8B, variant=1),
    _Pass(heads=_NARROW),
    _Pass(heads=_ODD, variant=1),
    _Pass(heads=_WIDE, variant=1, softcap=50.0),
    _Pass(heads=_FULL),
    _Pass(heads=_GPT_OSS, has_sinks=True),
    _Pass(heads=_GPT_OSS, variant=1, has_sinks=True),
)
_RARE = (
    *(_Pass(heads=QWEN3_06B, variant=variant) for variant in range(3)),
    *(_Pass(heads=_NARROW, variant=variant) for variant in (1, 2)),
    *(_Pass(heads=_ODD, variant=variant) for variant in (0, 2)),
    *(_Pass(heads=_FP8_8B, variant=variant) for variant in (0, 2)),
    *(_Pass(heads=_WIDE, variant=variant) for variant in range(2)),
    *(_Pass(heads=_WIDE_FP8, variant=variant) for variant in range(2)),
    _Pass(heads=_WIDE, softcap=50.0),
    _Pass(heads=_WIDE_FULL),
    *(
        _Pass(heads=heads, is_deterministic=True)
        for heads in (QWEN3_06B, _NARROW, _ODD, _WIDE, _FULL, _WIDE_FULL, _FP8_8B)
    ),
    _Pass(heads=QWEN3_8B, is_deterministic=True, has_trees=False),
    *(_Pass(heads=heads, num_rows=16) for heads in (QWEN3_06B, _NARROW, _FP8_8B, _WIDE, _FULL)),
    *(_Pass(heads=heads, variant=1, num_rows=16) for heads in (_ODD, _FP8_8B, _WIDE_FP8)),
    _Pass(heads=_WIDE_FULL, num_rows=16),
    *(_Pass(heads=_GPT_OSS, variant=variant, num_rows=16) for variant in range(3)),
    _Pass(heads=QWEN3_8B, batch=256),
    _Pass(heads=_HUGE),
)

ATTENTION = tuple(
    Specimen(stem="attend_tiles", name=one.name, run=partial(one.run), is_long=is_long)
    for passes, is_long in ((_COMMON, False), (_RARE, True))
    for one in passes
)
