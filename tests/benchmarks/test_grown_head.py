"""A head that was grown with its large model reads what it read before."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shared.grown_head import grow_head
from outrider.draft.heads.read_head import read_head
from outrider.draft.training.expand import expand
from outrider.draft.training.expand_shape import Shape
from outrider.engine.model.decoder import DecoderModel
from tests.draft.heads.head_files import (
    eagle3_weights,
    make_target,
    specforge_config,
    specforge_names,
    write_head,
)

LARGER = Shape(hidden_size=256, num_layers=8, intermediate_size=160, num_heads=16, num_kv_heads=4)
TAPS = [0, 1, 2]


def features(head_folder: Path, target_folder: Path) -> torch.Tensor:
    target = DecoderModel.load(str(target_folder))
    head = read_head(str(head_folder), target)
    reference = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = reference(torch.arange(3, 20)[None], output_hidden_states=True)
    taps = torch.cat([output.hidden_states[tap][0] for tap in head.tap_layers], dim=-1)
    return head.features_of_taps(taps)


def test_features_are_those_of_the_model_it_was_trained_for(tmp_path: Path) -> None:
    source, target = tmp_path / "old", tmp_path / "new"
    make_target(source)
    expand(source, target, LARGER)
    weights = specforge_names(eagle3_weights())
    config = specforge_config(weights, eagle_aux_hidden_state_layer_ids=TAPS)
    head = Path(write_head(tmp_path / "head", weights, config))
    grow_head(head, source, target, tmp_path / "grown")
    before, after = features(head, source), features(tmp_path / "grown", target)
    assert before.std() > 0.1
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_a_head_that_reads_behind_the_last_norm_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "old", tmp_path / "new"
    make_target(source)
    expand(source, target, LARGER)
    weights = specforge_names(eagle3_weights())
    config = specforge_config(weights, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    head = Path(write_head(tmp_path / "head", weights, config))
    with pytest.raises(ValueError, match="last norm"):
        grow_head(head, source, target, tmp_path / "grown")
