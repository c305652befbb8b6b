"""Blocks that are exported and imported: the same bytes, found by the same hashes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.cache.block_pool import BlockHash, prefix_hashes
from outrider.engine.cache.extents import Extent, ExtentError, pack_extent, unpack_extent
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.engines import random_prompt, tiny_pair
from tests.laws.cached_text import cached_kv
from tests.models import save_hf_model

TOKENS = list(random_prompt(200))
BLOCK = 16
# Every layout of a cache: plain, with scales, with a smaller cache for windows, with other heads
# there, and with states beside it.
LAYOUTS = {
    "paged": ("llama3", {}),
    "fp8": ("llama3", {"kv_dtype": torch.float8_e4m3fn}),
    "windowed": ("gemma2", {"num_window_blocks": 40}),
    "windows alone": ("mistral", {"num_window_blocks": 40}),
    "other heads": ("gemma4_text", {"num_window_blocks": 40}),
    "other heads, not smaller": ("gemma4_text", {}),
    "recurrent": ("qwen3_5", {"recurrent_sizes": RecurrentSizes(num_lines=4, num_checkpoints=8)}),
}


def runner_of(layout: str, *, num_blocks: int = 40) -> ModelRunner:
    architecture, options = LAYOUTS[layout]
    return ModelRunner(
        model=tiny_pair(architecture).large, num_blocks=num_blocks, block_size=BLOCK, **options
    )


@torch.inference_mode()
def logits_behind(runner: ModelRunner, tokens: list[int]) -> tuple[int, torch.Tensor]:
    """(tokens found in the cache, the last token's logits); the view is released."""
    view = runner.new_view("salt")
    num_cached = view.match_prefix(tokens)
    for start in range(num_cached, len(tokens), 64):
        piece = tokens[start : start + 64]
        runner.copy_blocks(view.reserve(start + len(piece)))
        output = runner.forward(
            [ForwardSlice(view=view, token_ids=piece, start_slot=start, num_logit_rows=1)]
        )
        view.advance(start + len(piece), tokens)
    view.release()
    return num_cached, output.logits.clone()


def hashes_of(runner: ModelRunner, tokens: list[int]) -> tuple[BlockHash, list[BlockHash]]:
    root = runner.new_view("salt").root
    return root, list(prefix_hashes(root, tokens, BLOCK))


def exported(runner: ModelRunner, tokens: list[int] = TOKENS) -> list[Extent]:
    root, hashes = hashes_of(runner, tokens)
    return runner.extents.export_blocks(hashes, parent=root)


@pytest.mark.slow_cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_back_is_found_and_gives_the_same_logits(layout: str) -> None:
    source, target = runner_of(layout), runner_of(layout)
    logits_behind(source, TOKENS)
    num_cached, right = logits_behind(source, TOKENS)
    assert num_cached >= 128

    packed = [pack_extent(extent) for extent in exported(source)]
    root, hashes = hashes_of(target, TOKENS)
    extents = [unpack_extent(each) for each in packed]
    found = target.extents.import_blocks(extents, root=root, token_ids=TOKENS)
    assert set(found) <= set(hashes)
    assert target.pool.num_used == 0

    assert logits_behind(target, TOKENS)[0] == num_cached
    again = logits_behind(target, TOKENS)[1]
    torch.testing.assert_close(again, right, atol=0.0, rtol=0.0)
    assert target.extents.import_blocks(extents) == []  # all of it is there already


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_the_same_in_every_precision(dtype: str, tmp_path: Path) -> None:
    save_hf_model("llama3", tmp_path, vocab_size=131)
    model = load_model(str(tmp_path), dtype=dtype)
    source, target = (ModelRunner(model=model, num_blocks=20) for _ in range(2))
    logits_behind(source, TOKENS)
    target.pool.allocate()  # blocks have other numbers there
    target.extents.import_blocks(exported(source))
    views = [each.new_view("salt") for each in (source, target)]
    assert [view.match_prefix(TOKENS) for view in views] == [192, 192]
    assert views[0].block_table != views[1].block_table
    one, other = (
        cached_kv(runner, view, 192) for runner, view in zip((source, target), views, strict=True)
    )
    assert torch.equal(one, other)


def test_a_full_cache_takes_in_what_it_has_room_for() -> None:
    source, target = runner_of("paged"), runner_of("paged", num_blocks=8)
    logits_behind(source, TOKENS)
    held = [target.pool.allocate() for _ in range(3)]
    found = target.extents.import_blocks(exported(source))
    assert found == hashes_of(source, TOKENS)[1][:5]
    target.pool.release(held)
    assert target.pool.num_used == 0


def test_blocks_that_are_held_are_not_evicted_by_what_comes_in() -> None:
    """The first blocks of a text are not the price of its last ones."""
    source, target = runner_of("paged"), runner_of("paged", num_blocks=8)
    logits_behind(source, TOKENS)
    extents = exported(source)
    target.extents.import_blocks(extents)
    target.extents.import_blocks(extents)
    assert target.new_view("salt").match_prefix(TOKENS) == 8 * BLOCK


def test_blocks_of_another_cache_or_text_are_refused() -> None:
    source, target = runner_of("paged"), runner_of("paged")
    logits_behind(source, TOKENS)
    extents = exported(source)
    root, _ = hashes_of(target, TOKENS)
    others = [
        runner_of("fp8"),
        ModelRunner(model=tiny_pair("llama3").large, num_blocks=40, block_size=8),
        ModelRunner(model=tiny_pair("llama3").small, num_blocks=40),
    ]
    for other in others:
        with pytest.raises(ExtentError, match="another model or cache"):
            other.extents.import_blocks(extents)
    with pytest.raises(ExtentError, match="another text"):
        target.extents.import_blocks(extents, root=root, token_ids=[5, *TOKENS[1:]])
    with pytest.raises(ExtentError, match="another text"):
        target.extents.import_blocks(extents, root=b"another tenant's", token_ids=TOKENS)
    shorter = replace(extents[0].header, hashes=extents[0].header.hashes[1:])
    with pytest.raises(ExtentError, match="other shapes"):
        target.extents.import_blocks([replace(extents[0], header=shorter)])
    assert target.pool.num_used == 0
    assert not target.pool.published()


def test_an_extent_of_which_a_byte_is_another_is_none() -> None:
    source = runner_of("paged")
    logits_behind(source, TOKENS)
    packed = pack_extent(exported(source)[0])
    assert unpack_extent(packed).header == exported(source)[0].header
    for place in [*range(0, 400, 7), len(packed) // 2, len(packed) - 1]:
        changed = bytearray(packed)
        changed[place] ^= 1
        with pytest.raises(ExtentError):
            unpack_extent(bytes(changed))
    for size in (0, 5, 40, len(packed) // 2, len(packed) - 1):
        with pytest.raises(ExtentError):
            unpack_extent(packed[:size])
    newer = packed[:6] + (2).to_bytes(2, "little") + packed[8:]
    with pytest.raises(ExtentError, match="version 2"):
        unpack_extent(newer)
