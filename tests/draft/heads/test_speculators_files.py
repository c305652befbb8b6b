"""Files that speculators itself saves are read, and compute what its own modules compute.

Runs where speculators is installed; its layout is tested without it in test_eagle3.py and others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from outrider.draft.heads.read_head import read_head
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.draft.heads.head_files import HIDDEN, VOCAB, make_target
from tests.engine.model.decoder_passes import make_tokens

speculators: Any = pytest.importorskip("speculators")

NUM_TOKENS = 50
NUM_ROWS = 9
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
EAGLE3 = {"draft_vocab_size": NUM_TOKENS, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
EAGLE3_1 = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}


def new_drafter(name: str, layers: Any, **options: Any) -> Any:
    """A random drafter of a class of speculators."""
    torch.manual_seed(0)
    layers._attn_implementation = "eager"
    method = speculators.TokenProposalConfig.registry["greedy"](speculative_tokens=4)
    described = speculators.SpeculatorsConfig(
        algorithm=name.lower(),
        proposal_methods=[method],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = getattr(speculators, f"{name}SpeculatorConfig")(
        transformer_layer_config=layers, speculators_config=described, **options
    )
    drafter = getattr(speculators, f"{name}DraftModel")(config)
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2 + float(parameter.ndim == 1)
    if options.get("draft_vocab_size") == NUM_TOKENS:
        token_ids = torch.randperm(VOCAB)[:NUM_TOKENS].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, token_ids, True)
        drafter.load_vocab_mappings(known, token_ids - torch.arange(NUM_TOKENS))
    return drafter


@pytest.mark.parametrize(
    ("layers", "options"),
    [(LlamaConfig, EAGLE3), (Qwen3Config, EAGLE3 | EAGLE3_1)],
    ids=["EAGLE-3", "EAGLE-3.1"],
)
def test_eagle3(layers: Any, options: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = new_drafter("Eagle3", layers(num_hidden_layers=1, **LAYER), **options)
    drafter.save_pretrained(tmp_path / "head")
    head = read_head(str(tmp_path / "head"), target)
    assert head.tap_layers == (0, 1, 2)
    assert head.target_token_ids is not None
    tokens, taps = make_tokens(NUM_ROWS), torch.randn(NUM_ROWS, 3 * HIDDEN)
    seen: list[Tensor] = []
    drafter.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    with torch.no_grad():
        drafter(
            hidden_states=taps[None],
            input_ids=tokens[None],
            document_ids=torch.zeros(1, NUM_ROWS, dtype=torch.int64),
            ttt_steps=1,
        )
    runner = ModelRunner(model=head, num_blocks=4)
    view = runner.new_view("")
    view.reserve(NUM_ROWS)
    piece = ForwardSlice(
        view=view, token_ids=tokens.tolist(), start_slot=0, num_logit_rows=NUM_ROWS
    )
    output = runner.forward([piece], features=head.features_of_taps(taps))
    torch.testing.assert_close(output.logits, seen[0], atol=1e-3, rtol=1e-3)
    view.release()


def test_drafters_of_blocks(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    mask = {"mask_token_id": VOCAB - 1}
    parallel = new_drafter("PEagle", LlamaConfig(num_hidden_layers=1, **LAYER), **EAGLE3, **mask)
    parallel.save_pretrained(tmp_path / "peagle")
    head = read_head(str(tmp_path / "peagle"), target)
    assert head.kind == "peagle"
    assert head.block is not None
    assert head.block.num_depths == 4
    own = {"block_size": 5, "aux_hidden_state_layer_ids": [1, 3], "draft_vocab_size": VOCAB}
    block = new_drafter("DFlash", Qwen3Config(num_hidden_layers=2, **LAYER), **own, **mask)
    block.save_pretrained(tmp_path / "dflash")
    head = read_head(str(tmp_path / "dflash"), target)
    assert (head.kind, head.tap_layers) == ("dflash", (1, 3))
    assert head.block is not None
    assert head.block.num_rows == 5


def test_mtp(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "qwen3")
    drafter = new_drafter("MTP", Qwen3Config.from_pretrained(tmp_path / "target"))
    drafter.save_pretrained(tmp_path / "head")
    head = read_head(str(tmp_path / "head"), target)
    assert (head.kind, head.tap_layers) == ("mtp", (3,))
