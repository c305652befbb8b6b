"""Layers in one compiled call have the bits of their operations one by one."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.model.compiled_layers import CompiledLayers
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.layers import row_invariant_linear
from outrider.kernels.layers.compiled_pass import MAX_ROWS
from outrider.kernels.triton_support import use_kernels
from tests.kernels.layers.bits import same_bits, torch_threads
from tests.models import make_hf_model

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"products: {product_support().detail}"
)
MODELS = ("llama3", "llama-biases", "qwen3", "mistral", "smollm3")


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: False)


def load(name: str, folder: Path, scheme: SchemeName | None = None, **shape: int) -> DecoderModel:
    hf_model = make_hf_model(name, **{"head_dim": 32, **shape})
    hf_model.to(torch.bfloat16).save_pretrained(folder)
    rounding = None if scheme is None else Rounding(scheme=scheme)
    return DecoderModel.load(str(folder), rounding=rounding)


def logits(
    model: DecoderModel,
    *,
    is_compiled: bool,
    wanted: int | None = None,
    taps: tuple[int, ...] = (),
) -> list[Tensor]:
    """Two prompts in chunks that share passes; with taps, the taps behind the logits."""
    compiled, model._compiled = model._compiled, model._compiled if is_compiled else None
    runner = ModelRunner(model=model, num_blocks=32, block_size=16, taps=taps)
    views = [runner.new_view("") for _ in range(2)]
    found = []
    for start, end in ((0, 21), (21, 37)):
        pieces = []
        for view in views:
            view.reserve(end)
            ids = list(range(5 + start, 5 + end))
            rows = len(ids) if wanted is None else min(wanted, len(ids))
            piece = ForwardSlice(view=view, token_ids=ids, start_slot=start, num_logit_rows=rows)
            pieces.append(piece)
        output = runner.forward(pieces)
        found += [output.logits] if output.taps is None else [output.logits, output.taps]
    model._compiled = compiled
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_has_the_bits_of_its_operations_one_by_one(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    assert model._compiled is not None
    assert model._compiled._pass.is_whole
    for wanted in (None, 1, 14):
        expected = logits(model, is_compiled=False, wanted=wanted)
        for num_threads in (1, 2):
            with torch_threads(num_threads):
                found = logits(model, is_compiled=True, wanted=wanted)
            assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("wanted", [None, 1, 14])
@pytest.mark.parametrize("taps", [(0, 1), (2, 0), (1,)])
def test_taps_have_the_bits_of_operations_one_by_one(
    taps: tuple[int, ...], wanted: int | None, tmp_path: Path
) -> None:
    """All rows, whichever get logits, whose bits taps leave alone."""
    model = load("qwen3", tmp_path)
    expected = logits(model, is_compiled=False, wanted=wanted, taps=taps)
    found = logits(model, is_compiled=True, wanted=wanted, taps=taps)
    assert [each.shape[0] for each in found[1::2]] == [42, 32]
    assert all(map(same_bits, found, expected))
    assert all(map(same_bits, found[::2], logits(model, is_compiled=True, wanted=wanted)))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rounded_weights_run_in_one_call_too(scheme: SchemeName, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = load("qwen3", tmp_path, scheme, **wide)
    assert model._compiled is not None
    expected = logits(model, is_compiled=False)
    assert all(map(same_bits, logits(model, is_compiled=True), expected))


def test_sinks_and_capped_scores_are_computed_in_the_call(tmp_path: Path) -> None:
    model = load("llama2", tmp_path)
    plain = logits(model, is_compiled=True)
    sinks = torch.linspace(-1, 3, model.config.num_query_heads)
    model._layers = tuple(replace(layer, sinks=sinks) for layer in model._layers)
    model.config = replace(model.config, attention_softcap=2.0)
    model._attend._config = model.config
    model._compiled = CompiledLayers.of(
        model._layers, model.config, model._rotary, scale=model._scale
    )
    found = logits(model, is_compiled=True)
    assert all(map(same_bits, found, logits(model, is_compiled=False)))
    assert not same_bits(found[0], plain[0])


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "cohere2", "mixtral", "granite"])
def test_models_with_other_parts_run_one_by_one(name: str, tmp_path: Path) -> None:
    assert load(name, tmp_path)._compiled is None


def test_other_precisions_kernels_and_caches_run_one_by_one(tmp_path: Path) -> None:
    make_hf_model("llama2", head_dim=32).save_pretrained(tmp_path)
    assert DecoderModel.load(str(tmp_path), dtype="float32")._compiled is None
    with use_kernels("reference"):
        assert DecoderModel.load(str(tmp_path), dtype="bfloat16")._compiled is None


def test_long_passes_run_one_by_one_to_the_same_bits(tmp_path: Path) -> None:
    model = load("llama2", tmp_path)
    runner = ModelRunner(model=model, num_blocks=32, block_size=16)
    count = MAX_ROWS + 1
    ids = [5 + each % 100 for each in range(count)]

    def rows(*lengths: int) -> Tensor:
        view = runner.new_view("")
        view.reserve(count)
        start, found = 0, []
        for length in lengths:
            piece = ForwardSlice(
                view=view,
                token_ids=ids[start : start + length],
                start_slot=start,
                num_logit_rows=length,
            )
            found.append(runner.forward([piece]).logits)
            start += length
        view.release()
        return torch.cat(found)

    assert same_bits(rows(count), rows(MAX_ROWS, 1))


def test_a_position_beyond_the_table_is_refused(tmp_path: Path) -> None:
    model = load("llama2", tmp_path)
    runner = ModelRunner(model=model, num_blocks=32, block_size=16)
    view = runner.new_view("")
    view.reserve(4)
    model._rotary = tuple(model._rotary)
    for table in model._rotary:
        table._table = table._table[:2].contiguous()
    model._compiled = CompiledLayers.of(
        model._layers, model.config, model._rotary, scale=model._scale
    )
    piece = ForwardSlice(view=view, token_ids=[5, 6, 7], start_slot=0, num_logit_rows=3)
    with pytest.raises(IndexError, match="position or its slot"):
        runner.forward([piece])


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = load("llama2", tmp_path)
    runner = ModelRunner(model=model, num_blocks=32, block_size=16)
    view = runner.new_view("")
    view.reserve(4)
    for token in (-1, model.config.vocab_size):
        piece = ForwardSlice(view=view, token_ids=[5, token], start_slot=0, num_logit_rows=2)
        with pytest.raises(IndexError, match="a row's token"):
            runner.forward([piece])


def test_addresses_of_a_cache_are_forgotten_with_it(tmp_path: Path) -> None:
    model = load("llama2", tmp_path)
    assert model._compiled is not None
    logits(model, is_compiled=True)
    gc.collect()
    assert not len(model._compiled._caches)
