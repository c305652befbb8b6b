"""Shares of the KV memory between tiers, and where layers have windows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.cache.window_blocks import BlockBytes, share_blocks, window_block_demand
from outrider.engine.config import MAX_SCORED_ROWS, EngineConfig
from outrider.engine.errors import EngineError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.passes.pass_graphs import estimate_bytes
from outrider.engine.passes.pass_memory import LargestPass, measure_pass_bytes
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.kv_budget import CacheSizes, _graph_bytes, cache_sizes
from tests.engines import tiny_pair
from tests.heads import random_head

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
        tier: SimpleNamespace(config=config, dtype=torch.float32, can_record=False, device=CPU)
        for tier, config in zip(("large", "small"), configs, strict=False)
    }
    return cache_sizes(settings, models, CPU)


def bytes_of(config: ModelConfig, sizes: CacheSizes, tier: str) -> int:
    """Memory of the cache that these sizes would make."""

    def per_block(*, windowed: bool) -> int:
        return KVCache.bytes_per_block(
            config, block_size=16, dtype=torch.float32, windowed=windowed
        )

    number = sizes.num_blocks[tier]  # type: ignore[index]
    own = sizes.num_window_blocks.get(tier, number)  # type: ignore[call-overload]
    return per_block(windowed=False) * number + per_block(windowed=True) * own


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
    assert sizes.num_blocks["large"] > without
    used = bytes_of(config, sizes, "large")
    assert gib * 2**30 - 2**16 < used <= gib * 2**30


def test_a_small_memory_is_not_split() -> None:
    sizes = sizes_of(config_of(1, 5), kv_cache_gib=0.002)
    assert sizes.num_blocks["large"] < DEMAND
    assert not sizes.num_window_blocks


def test_no_more_than_every_answer_at_full_length() -> None:
    sizes = sizes_of(config_of(0, 6), kv_cache_gib=0.02, max_context=4096)
    assert sizes.num_blocks == {"large": 8 * 4096 // 16}
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
        num_blocks={"large": 100}, num_window_blocks={}
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
    assert states + sizes.num_blocks["large"] * per_block <= gib * 2**30
    assert not sizes_of(config_of(1, 0), kv_cache_gib=gib).recurrent


def test_states_that_leave_nothing_are_refused() -> None:
    with pytest.raises(EngineError, match=r"Lower engine\.max_sequences"):
        sizes_of(tiny_pair("qwen3_5").large.config, kv_cache_gib=0.001)


# ---- shares of the tiers ---------------------------------------------------------------------


def shape(layers: int, most: int = 2**31 - 1) -> BlockBytes:
    """A block of 16 tokens of a model of Qwen3's shapes: 8 key-value heads of 128, bfloat16."""
    return BlockBytes(full=16 * layers * 2 * 8 * 128 * 2, most=most, least=2560)


def test_an_h200_holds_the_figures_of_the_docs() -> None:
    """139 GiB, 8B and 0.6B in bfloat16: 17.6 GB of weights, 5 GB of graphs and passes."""
    budget_bytes = 0.97 * (139 * 2**30 - 17.6e9 - 5e9)
    equal = share_blocks(budget_bytes, [shape(36), shape(28)])
    large, small = share_blocks(budget_bytes, [shape(36), replace(shape(28), share=0.5)])
    assert equal == [pytest.approx(large * 0.781, rel=0.01)] * 2
    assert small == large // 2
    assert 16 * large == pytest.approx(600_000, rel=0.02)  # tokens
    bytes_of_small = small * shape(28).full
    assert 0.27 < bytes_of_small / budget_bytes < 0.29


@given(
    budget_bytes=st.integers(0, 2**34),
    share=st.floats(0.1, 1.0),
    most=st.integers(1, 4000),
    least=st.integers(0, 50),
)
def test_shares_fit_and_leave_nothing_that_could_be_used(
    budget_bytes: int, share: float, most: int, least: int
) -> None:
    models = [
        replace(shape(36), most=most, least=least),
        replace(shape(28), share=share, most=most, least=least),
    ]
    large, small = share_blocks(budget_bytes, models)
    used = large * models[0].full + small * models[1].full
    assert used <= budget_bytes
    assert small <= large <= most
    if large < most:
        assert used + models[0].full + models[1].full > budget_bytes
        assert small >= min(int(share * large), least)
    elif small < most:  # the large tier has all that it can use: the rest is the small one's
        assert used + (1 + 1 / share) * models[1].full > budget_bytes


def test_a_full_answer_fits_into_both_tiers_before_the_large_one_gets_more() -> None:
    per_block = KVCache.bytes_per_block(config_of(2, 0), block_size=16, dtype=torch.float32)
    gib = 130 * per_block / 2**30
    sizes = sizes_of(config_of(2, 0), config_of(2, 0), kv_cache_gib=gib, max_context=800)
    each = 800 // 16
    assert sizes.num_blocks["small"] == each
    assert sizes.num_blocks["large"] == 130 - each
    ample = sizes_of(config_of(2, 0), config_of(2, 0), kv_cache_gib=1.0, max_context=800)
    assert ample.num_blocks == {"large": 8 * each, "small": 8 * each}
    given_ratio = sizes_of(
        config_of(2, 0), config_of(2, 0), kv_cache_gib=0.02, max_context=800, small_kv_ratio=1.0
    )
    assert given_ratio.num_blocks["small"] == given_ratio.num_blocks["large"]


def test_the_reserve_is_what_the_largest_pass_takes() -> None:
    class Memory:
        """An allocator that had 10 bytes in use and whose peak was 5,000 more."""

        is_reset = False

        def reset_peak(self) -> None:
            self.is_reset = True

        def used_bytes(self) -> int:
            return 10

        def peak_bytes(self) -> int:
            assert self.is_reset
            return 5010

    model = tiny_pair().large
    rows: list[int] = []
    forward = model.forward

    def watched(token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(token_ids))
        return forward(token_ids, *args, **kwargs)

    model.forward = watched  # type: ignore[method-assign]
    try:
        largest = LargestPass(max_rows=400, max_sequences=2, block_size=16, kv_dtype=model.dtype)
        needed = measure_pass_bytes(model, largest, memory=Memory())
    finally:
        model.forward = forward  # type: ignore[method-assign]
    assert rows == [400]
    assert needed == 5000 + 3 * (2 * 16 + MAX_SCORED_ROWS) * model.config.vocab_size * 4


def test_a_heads_graphs_and_what_it_reads_are_counted() -> None:
    head, large = random_head(), tiny_pair().large
    settings = Settings.model_validate({"engine": {"cuda_graphs": True}})
    alone = _graph_bytes(settings, {"large": large})
    own = estimate_bytes(head.config, head.dtype, feature_size=head.feature_size)
    assert _graph_bytes(settings, {"large": large}, head) > alone + own > alone > 0
