"""Checkpoints that benches store in packed numbers: read as stored ones, and near the plain one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.shared.gguf_files import store_gguf
from benchmarks.shared.stored_checkpoints import store_awq
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.engines import PAIR_FOLDER, heldout_prompts


def awq(plain: Path, folder: Path) -> Path:
    store_awq(plain, folder)
    return folder


def logits_of(folder: Path) -> tuple[str, torch.Tensor]:
    """Return how a checkpoint's products are computed, and what it says behind a prompt."""
    model = DecoderModel.load(str(folder), dtype="bfloat16", deterministic=True)
    runner = ModelRunner(model=model, num_blocks=16, block_size=16)
    prompt = list(heldout_prompts(1, seed=2)[0])
    view = runner.new_view("stored")
    view.reserve(len(prompt))
    piece = ForwardSlice(view=view, token_ids=prompt, start_slot=0, num_logit_rows=len(prompt))
    return model.scheme, runner.forward([piece]).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("store", [awq, store_gguf])
def test_a_stored_checkpoint_is_near_its_plain_one(
    store: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    plain = PAIR_FOLDER / "large"
    scheme, found = logits_of(store(plain, tmp_path / "stored"))
    _, right = logits_of(plain)
    assert scheme.startswith("stored")
    assert (found.argmax(-1) == right.argmax(-1)).float().mean() > 0.8
    assert not torch.equal(found, right)
