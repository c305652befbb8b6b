"""Shares of the KV memory where layers have windows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cache.window_blocks import window_block_demand
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from gateway.settings.tree import Settings
from gateway.wiring.kv_budget import CacheSizes, cache_sizes
from tests.engines import tiny_pair

WINDOW = 128
CPU = torch.device("cpu")


def config_of(num_full: int, num_windowed: int) -> ModelConfig:
    config = tiny_pair().large.config
    layer = config.layers[0]
    layers = (*[layer] * num_full, *[replace(layer, window=WINDOW)] * num_windowed)
    return replace(config, layers=layers, max_position_embeddings=32768)


def sizes_of(*configs: ModelConfig, **engine: Any) -> CacheSizes:
    settings = Settings.model_validate({"engine": {"max_sequences": 8, **engine}})
    models: Any = {
        tier: SimpleNamespace(config=config, dtype=torch.float32, can_record=False)
        for tier, config in zip(("large", "small"), configs, strict=False)
    }
    return cache_sizes(settings, models, CPU)


def bytes_of(config: ModelConfig, sizes: CacheSizes, tier: str) -> int:
    """Memory of the cache that these sizes would make."""

    def per_block(*, windowed: bool) -> int:
        return KVCache.bytes_per_block(
            config, block_size=16, dtype=torch.float32, windowed=windowed
        )

    own = sizes.num_window_blocks.get(tier, sizes.num_blocks)  # type: ignore[call-overload]
    return per_block(windowed=False) * sizes.num_blocks + per_block(windowed=True) * own


DEMAND = window_block_demand(
    WINDOW,
    block_size=16,
    max_sequences=8,
    max_step_tokens=EngineConfig().max_tokens_per_step,
)


@pytest.mark.parametrize("layers", [(1, 5), (3, 3), (5, 1)])
def test_windows_leave_the_memory_to_the_other_layers(layers: tuple[int, int]) -> None:
    config = config_of(*layers)
    gib = 0.02
    sizes = sizes_of(config, kv_cache_gib=gib)
    assert sizes.num_window_blocks == {"large": DEMAND}
    without = int(
        gib * 2**30 // KVCache.bytes_per_block(config, block_size=16, dtype=torch.float32)
    )
    assert sizes.num_blocks > without
    used = bytes_of(config, sizes, "large")
    assert gib * 2**30 - 2**16 < used <= gib * 2**30


def test_a_small_memory_is_not_split() -> None:
    sizes = sizes_of(config_of(1, 5), kv_cache_gib=0.002)
    assert sizes.num_blocks < DEMAND
    assert not sizes.num_window_blocks


def test_no_more_than_every_answer_at_full_length() -> None:
    sizes = sizes_of(config_of(0, 6), kv_cache_gib=0.02, max_context=4096)
    assert sizes.num_blocks == 8 * 4096 // 16
    assert sizes.num_window_blocks == {"large": DEMAND}


def test_each_tier_has_its_own_windows() -> None:
    plain = config_of(2, 0)
    both = sizes_of(config_of(1, 5), config_of(2, 2), kv_cache_gib=0.03)
    one = sizes_of(config_of(1, 5), plain, kv_cache_gib=0.03)
    assert set(both.num_window_blocks) == {"large", "small"}
    assert set(one.num_window_blocks) == {"large"}
    used = bytes_of(config_of(1, 5), both, "large") + bytes_of(config_of(2, 2), both, "small")
    assert used <= 0.03 * 2**30


def test_a_given_number_of_blocks_is_kept() -> None:
    assert sizes_of(config_of(1, 1), num_blocks=5000).num_window_blocks == {"large": DEMAND}
    assert sizes_of(config_of(1, 1), num_blocks=100) == CacheSizes(
        num_blocks=100, num_window_blocks={}
    )


def test_states_are_paid_for_before_blocks() -> None:
    config = tiny_pair("qwen3_5").large.config
    line_bytes, state_bytes = config.recurrent_bytes(input_bytes=4)
    gib = 0.02
    sizes = sizes_of(config, kv_cache_gib=gib, max_context=100)
    own = sizes.recurrent["large"]
    assert own.num_lines == 8
    assert own.num_checkpoints == int(0.1 * gib * 2**30 / state_bytes) > 8
    states = own.num_bytes(line_bytes=line_bytes, state_bytes=state_bytes)
    per_block = KVCache.bytes_per_block(config, block_size=16, dtype=torch.float32)
    assert states + sizes.num_blocks * per_block <= gib * 2**30
    assert not sizes_of(config_of(1, 0), kv_cache_gib=gib).recurrent


def test_states_that_leave_nothing_are_refused() -> None:
    with pytest.raises(EngineError, match=r"Lower engine\.max_sequences"):
        sizes_of(tiny_pair("qwen3_5").large.config, kv_cache_gib=0.001)
