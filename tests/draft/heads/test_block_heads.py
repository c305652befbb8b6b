"""Drafters of several tokens a pass against their published forward passes: P-EAGLE and DFlash."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from outrider.draft.heads.protocol import HeadError, HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.triton_support import use_kernels
from tests.draft.heads.head_files import (
    HIDDEN,
    VOCAB,
    Weights,
    dflash_config,
    dflash_reference,
    dflash_weights,
    eagle3_features,
    eagle3_reference,
    make_target,
    peagle_weights,
    specforge_config,
    speculators_config,
    write_head,
)
from tests.engine.model.decoder_passes import Rows, make_table, make_tokens, new_cache, run

NUM_TEXT: Final = 9
MASK: Final = 130


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return make_target(tmp_path_factory.mktemp("target"))


def make_taps(count: int, num_taps: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn((count, num_taps * HIDDEN), generator=generator)


def block_rows(head: HeadModel, last_token: int, start: int, table: list[int]) -> Rows:
    """A block's rows, the first in slot `start`."""
    assert head.block is not None
    return Rows(
        token_ids=torch.tensor(head.block.token_ids(last_token)),
        num_computed=start,
        block_table=table,
        tree_start=start,
        masks=head.block.ancestor_masks(),
        depths=list(range(head.block.num_rows)),
    )


def run_text(
    head: HeadModel, cache: KVCache, table: list[int], tokens: Tensor, features: Tensor, start: int
) -> None:
    rows = Rows(token_ids=tokens, num_computed=start, block_table=table)
    run(head, cache, rows, rows=torch.tensor([]).long(), features=features)


# ---- P-EAGLE ----------------------------------------------------------------------------------

PEAGLE: Final[dict[str, tuple[dict[str, Any], Any, dict[str, Any]]]] = {
    "speculators": (
        {"norms": "fc_norm", "num_layers": 2},
        speculators_config,
        {"kind": "peagle", "mask_token_id": MASK, "fc_norm": True},
    ),
    "published": ({}, specforge_config, {"ptd_token_id": MASK, "block_size": 4}),
}


@pytest.mark.parametrize("layout", PEAGLE)
def test_peagle(layout: str, tmp_path: Path, target: DecoderModel) -> None:
    """Masks behind the last token carry one row of features, and see the text and each other."""
    options, make_config, changes = PEAGLE[layout]
    weights = peagle_weights(**options)
    config = make_config(weights, **changes)
    head = read_head(write_head(tmp_path, weights, config), target)
    assert head.kind == "peagle"
    block, mask = head.block, head.mask_features
    assert block is not None
    assert mask is not None
    assert (block.num_depths, block.is_behind_text) == (5 if layout == "speculators" else 4, False)
    text, taps = make_tokens(NUM_TEXT), make_taps(NUM_TEXT, 3)
    features = head.features_of_taps(taps)
    assert (mask - eagle3_features(weights, weights["mask_hidden"])[0, 0]).abs().max() < 1e-4
    cache, table = new_cache(head), make_table(0)
    run_text(head, cache, table, text[:-1], features[:-1], 0)
    masks = mask.expand(block.num_rows - 1, -1)
    output = run(
        head,
        cache,
        block_rows(head, int(text[-1]), NUM_TEXT - 1, table),
        features=torch.cat((features[-1:], masks)),
    )
    token_ids = torch.cat((text, torch.full((block.num_rows - 1,), MASK)))
    count = len(token_ids)
    fields = {"num_hidden_layers": options.get("num_layers", 1)} | config
    logits, _ = eagle3_reference(
        weights,
        fields,
        target.embedding,
        token_ids,
        torch.cat((features, masks)),
        torch.arange(count),
        torch.ones(count, count).tril().bool(),
    )
    assert (output.logits - logits[-block.num_rows :]).abs().max() < 1e-3


# ---- DFlash -----------------------------------------------------------------------------------


def dflash(folder: Path, target: DecoderModel) -> tuple[HeadModel, Weights]:
    weights = dflash_weights()
    return read_head(write_head(folder, weights, dflash_config(weights)), target), weights


def test_dflash_behind_a_growing_text(tmp_path: Path, target: DecoderModel) -> None:
    """Text in chunks; a block; what was accepted; the next block in one pass with it."""
    head, weights = dflash(tmp_path, target)
    assert head.kind == "dflash"
    assert head.tap_layers == (1, 3)
    block = head.block
    assert block is not None
    assert (block.num_rows, block.num_depths, block.is_behind_text) == (5, 4, True)
    text, taps = make_tokens(NUM_TEXT + 3), make_taps(NUM_TEXT + 3, 2)
    features = head.features_of_taps(taps)
    cache, table = new_cache(head), make_table(1)
    run_text(head, cache, table, text[1:5], features[:4], 0)
    run_text(head, cache, table, text[5:NUM_TEXT], features[4 : NUM_TEXT - 1], 4)

    def check(output: ForwardOutput, num_known: int) -> None:
        rows = torch.tensor(block.token_ids(int(text[num_known])))
        hidden = dflash_reference(weights, target.embedding, taps[:num_known], rows)
        assert (output.hidden - hidden).abs().max() < 1e-3
        assert (output.logits - target.head(hidden)).abs().max() < 1e-3

    start = NUM_TEXT - 1
    anything = torch.full((block.num_rows, HIDDEN), 7.0)
    own = block_rows(head, int(text[start]), start, table)
    check(run(head, cache, own, features=anything), start)
    # three tokens are accepted: their features take the block's place in the cache
    accepted = slice(start, start + 3)
    piece = Rows(token_ids=text[1:][accepted], num_computed=start, block_table=table)
    other = block_rows(head, int(text[start]), 0, make_table(2))
    both = torch.cat((features[accepted], anything))
    wanted = torch.arange(3, 3 + block.num_rows)
    alone = run(head, cache, piece, other, rows=wanted, features=both)
    check(
        run(
            head, cache, block_rows(head, int(text[start + 3]), start + 3, table), features=anything
        ),
        start + 3,
    )
    hidden = dflash_reference(
        weights, target.embedding, taps[:0], torch.tensor(block.token_ids(int(text[start])))
    )
    assert (alone.hidden - hidden).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        ("float32", "triton"),
        ("bfloat16", "auto"),
        pytest.param("bfloat16", "triton", marks=pytest.mark.slow),
    ],
)
def test_dflash_on_every_path(dtype: Any, path: Any, tmp_path: Path) -> None:
    """Triton's kernels, and the compiled ones of the CPU, against torch: a block behind a text."""
    make_target(tmp_path / "target")
    device = "cuda" if path == "triton" and torch.cuda.is_available() else "cpu"
    outputs = []
    for kernels, place in (("reference", "cpu"), (path, device)):
        large = DecoderModel.load(str(tmp_path / "target"), dtype=dtype, device=place)
        with use_kernels(kernels):
            head, _ = dflash(tmp_path / kernels, large)
            cache, table = new_cache(head), make_table(0)
            features = head.features_of_taps(make_taps(7, 2).to(large.dtype).to(place))
            run_text(head, cache, table, make_tokens(7), features, 0)
            filler = torch.zeros((5, HIDDEN), dtype=large.dtype, device=place)
            output = run(head, cache, block_rows(head, 5, 7, table), features=filler)
        outputs.append(output.logits.float().cpu())
    bound = 1e-3 if dtype == "float32" else 0.3
    assert (outputs[1] - outputs[0]).abs().max() < bound


def test_dflash_in_a_runner(tmp_path: Path, target: DecoderModel) -> None:
    """Text rows and a block's in one pass, through slices."""
    head, weights = dflash(tmp_path, target)
    assert head.block is not None
    runner = ModelRunner(model=head, num_blocks=16, block_size=4)
    view = runner.new_view("")
    view.reserve(NUM_TEXT + head.block.num_rows)
    text, taps = make_tokens(NUM_TEXT + 1), make_taps(NUM_TEXT, 2)
    block = head.block.token_ids(int(text[-1]))
    slices = [
        ForwardSlice(view=view, token_ids=text[1:].tolist(), start_slot=0, num_logit_rows=0),
        ForwardSlice(
            view=view,
            token_ids=block,
            start_slot=NUM_TEXT,
            num_logit_rows=len(block),
            tree_start=NUM_TEXT,
            ancestor_masks=head.block.ancestor_masks(),
        ),
    ]
    features = torch.cat((head.features_of_taps(taps), torch.zeros((len(block), HIDDEN))))
    output = runner.forward(slices, features=features)
    hidden = dflash_reference(weights, target.embedding, taps, torch.tensor(block))
    assert (output.hidden - hidden).abs().max() < 1e-3
    assert output.logits.shape == (len(block), VOCAB)


def test_windows_that_hide_later_rows_are_refused(tmp_path: Path, target: DecoderModel) -> None:
    weights = dflash_weights()
    fields = dflash_config(weights, layer_types=["sliding_attention"] * 2, sliding_window=8)
    config = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 5,
        "mask_token_id": MASK,
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": fields,
    }
    with pytest.raises(HeadError, match="see no later rows of a block"):
        read_head(write_head(tmp_path, weights, config), target)
    assert (
        read_head(
            write_head(tmp_path, weights, {**config, "sliding_window_non_causal": True}), target
        ).config.sliding_window
        == 8
    )
