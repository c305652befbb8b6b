"""Checkpoints that stay quantised compute what their decoded weights compute, to the bit."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.gguf.blocks import packed_blocks
from outrider.engine.model.gguf.header import TENSOR_TYPES
from outrider.engine.model.quantised.formats import DECODE, EXACT, Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.stored_panel_linear import StoredPanelLinear
from outrider.kernels.layers import row_invariant_linear
from outrider.kernels.triton_support import use_kernels
from tests.engine.model.test_gguf import folder_of, write_both
from tests.engine.model.test_quantised_weights import CASES, quantise_folder
from tests.kernels.layers.bits import same_bits, torch_threads
from tests.models import edit_config, save_hf_model

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"products: {product_support().detail}"
)
DECODED = {"gptq-act-order"}  # columns that are in no order
GGUF = {Kind.Q8_0: "int8", Kind.Q4_0: "int4", Kind.Q4_1: "int4", Kind.Q5_0: None}


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: False)


def logits(model: DecoderModel) -> list[Tensor]:
    """Of a prompt, which has more rows than a compiled layer takes, and of a few rows after it."""
    runner = ModelRunner(model=model, num_blocks=16, block_size=16)
    view = runner.new_view("")
    found = []
    for start, end in ((0, 140), (140, 149), (149, 150)):
        view.reserve(end)
        ids = [5 + place % 40 for place in range(start, end)]
        piece = ForwardSlice(view=view, token_ids=ids, start_slot=start, num_logit_rows=end - start)
        found.append(runner.forward([piece]).logits)
    return found


def load_both(folder: str) -> tuple[DecoderModel, DecoderModel]:
    """As it is stored with rows that are not rounded, and decoded at load."""
    return (
        DecoderModel.load(folder, dtype="bfloat16", rounding=EXACT),
        DecoderModel.load(folder, dtype="bfloat16", rounding=DECODE),
    )


def assert_alike(stored: DecoderModel, decoded: DecoderModel) -> None:
    for found, expected in zip(logits(stored), logits(decoded), strict=True):
        assert same_bits(found, expected)
    with torch_threads(1):
        assert same_bits(logits(stored)[1], logits(decoded)[1])


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_s_logits_are_its_decoded_weights(case: str, tmp_path: Path) -> None:
    quantise_folder(tmp_path, case)
    stored, decoded = load_both(str(tmp_path))
    assert stored._compiled is not None  # layers are one call each
    assert_alike(stored, decoded)
    assert decoded.scheme == "bfloat16"
    stays = case not in DECODED
    if case != "fp8-blocks":  # theirs do not divide all weights
        assert stays == isinstance(stored._layers[0].qkv, StoredPanelLinear)
    assert stays == stored.scheme.startswith("stored ")
    assert stays == (stored.numerics != decoded.numerics)
    assert stays == (stored.weight_bytes < decoded.weight_bytes)
    assert stored.num_parameters == decoded.num_parameters


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", GGUF, ids=lambda kind: kind.name)
def test_a_gguf_file_s_logits_are_its_decoded_weights(kind: Kind, tmp_path: Path) -> None:
    file, _ = write_both(tmp_path, "llama3" if kind == Kind.Q8_0 else "qwen2", kind)
    stored, decoded = load_both(str(folder_of(file)))
    assert_alike(stored, decoded)
    number = GGUF[kind]
    assert stored.scheme == ("bfloat16" if number is None else f"stored {number}")


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", [*CASES, *GGUF], ids=lambda case: getattr(case, "name", case))
def test_rows_are_rounded_by_default(case: str | Kind, tmp_path: Path) -> None:
    """Logits are nearly the decoded model's, with the same bits alone and in company."""
    if isinstance(case, str):
        quantise_folder(tmp_path, case)
        folder = str(tmp_path)
    else:
        folder = str(folder_of(write_both(tmp_path, "qwen2", case)[0]))
    rounded, (exact, decoded) = DecoderModel.load(folder, dtype="bfloat16"), load_both(folder)
    is_rounded = rounded.scheme.endswith(", rows in int8")
    assert is_rounded == ("int" in exact.scheme)
    assert is_rounded == (rounded.numerics != exact.numerics)
    assert rounded.weight_bytes == exact.weight_bytes
    found, expected = (torch.cat(logits(each)).float() for each in (rounded, decoded))
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.1 if is_rounded else error == 0
    with torch_threads(1):
        assert same_bits(torch.cat(logits(rounded)).float(), found)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_blocks_are_held_as_the_package_decodes_them(name: str) -> None:
    kind = next(each for each, stored in TENSOR_TYPES.items() if stored.name == name)
    size = TENSOR_TYPES[kind].block_bytes
    generator = torch.Generator().manual_seed(kind)
    blocks = torch.randint(0, 256, (12, size), dtype=torch.uint8, generator=generator)
    for place in (0, 2, size - 2):  # scales in float16: no NaN, no infinity
        blocks[:, place + 1] &= 0x3B
    found = packed_blocks(name, blocks, 4)
    assert found is not None
    expected = torch.from_numpy(dequantize(blocks.view(4, -1).numpy(), Kind(kind)))
    assert torch.equal(found.decoded(torch.float32), expected)
    assert packed_blocks("Q5_K", blocks, 4) is None


def test_half_precision_checkpoints_compute_in_bfloat16_to_stay(tmp_path: Path) -> None:
    quantise_folder(tmp_path, "awq")
    edit_config(tmp_path, dtype="float16")
    stored = DecoderModel.load(str(tmp_path))
    assert (stored.dtype, stored.scheme) == (torch.bfloat16, "stored int4, rows in int8")
    for options in ({"dtype": "float16"}, {"rounding": DECODE}):
        decoded = DecoderModel.load(str(tmp_path), **options)
        assert (decoded.dtype, decoded.scheme) == (torch.float16, "float16")


def test_where_no_kernel_runs_weights_are_decoded(tmp_path: Path) -> None:
    quantise_folder(tmp_path, "awq")
    with use_kernels("reference"):
        assert DecoderModel.load(str(tmp_path), dtype="bfloat16").scheme == "bfloat16"
    assert DecoderModel.load(str(tmp_path), rounding=Rounding(scheme="int8")).scheme == "int8"


def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save_hf_model("gpt-oss", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    weights = load_file(file)
    experts, width, rows = weights.pop(name).shape
    scales = torch.full((experts, rows, width // 32), 127, dtype=torch.uint8)
    scales[0, 1, 0] = 255
    blocks = torch.zeros((*scales.shape, 16), dtype=torch.uint8)
    weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, file, metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*down_proj_scales.* no number"):
        DecoderModel.load(str(tmp_path))
