"""MTP heads of whole checkpoints, against transformers' own layers of the same weights."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.draft.heads.protocol import HeadError, HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.engine.model.decoder import DecoderModel
from tests.draft.heads.head_files import HIDDEN, write_head
from tests.engine.model.decoder_passes import (
    PARENTS,
    Rows,
    ancestors_of,
    make_table,
    make_tokens,
    new_cache,
    run,
    tree_rows,
)
from tests.models import edit_config, save_hf_model

NUM_TEXT: Final = 9
# How checkpoints name what is not of the layer itself: below a prefix, behind it.
QWEN: Final = {
    "fc.weight": "fc.weight",
    "token_norm.weight": "pre_fc_norm_embedding.weight",
    "hidden_norm.weight": "pre_fc_norm_hidden.weight",
    "norm.weight": "norm.weight",
}
LAST_LAYER: Final = {
    "fc.weight": "eh_proj.weight",
    "token_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}
SPECULATORS: Final = {
    "fc.weight": "input_proj.weight",
    "token_norm.weight": "token_layernorm.weight",
    "hidden_norm.weight": "hidden_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
}


class Twins:
    """A large model with an MTP head, and the head in transformers' modules."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the head's layer from a second random model: its last with attention."""
        self.large = folder / "large"
        save_hf_model(name, self.large, seed=0)
        self.other: Any = save_hf_model(name, folder / "other", seed=7)
        kinds = getattr(self.other.config, "layer_types", None) or ["full_attention"] * 3
        index = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
        self.layer: nn.Module = self.other.model.layers[index]
        prefix = f"model.layers.{index}."
        stored = load_file(folder / "other" / "model.safetensors")
        self.of_layer = {n.removeprefix(prefix): w for n, w in stored.items() if prefix in n}
        made = torch.Generator().manual_seed(5)
        self.own = {
            "fc.weight": 0.2 * torch.randn((HIDDEN, 2 * HIDDEN), generator=made),
            **{
                f"{name}.weight": 0.5 + torch.rand(HIDDEN, generator=made)
                for name in ("token_norm", "hidden_norm", "norm")
            },
        }

    def named(self, names: dict[str, str], prefix: str, layer_prefix: str) -> dict[str, Tensor]:
        own = {f"{prefix}{names[name]}": each for name, each in self.own.items()}
        return own | {f"{layer_prefix}{name}": each for name, each in self.of_layer.items()}

    def put_into_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        path = self.large / "model.safetensors"
        save_file({**load_file(path), **tensors}, path)

    def reference(
        self, token_ids: Tensor, hidden: Tensor, target: DecoderModel, *, feeds_normed: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits and what the next level carries, of a plain sequence."""
        model, count = self.other.model, len(token_ids)
        norms = {}
        for name in ("token_norm", "hidden_norm", "norm"):
            norms[name] = type(model.norm)(HIDDEN, eps=self.other.config.rms_norm_eps)
            norms[name].weight.data = self.own[f"{name}.weight"]
        tokens = norms["token_norm"](target.embedding[token_ids])
        rows = torch.cat((tokens, norms["hidden_norm"](hidden)), -1) @ self.own["fc.weight"].T
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        with torch.inference_mode():
            output = self.layer(
                rows[None],
                position_embeddings=model.rotary_emb(rows[None], positions),
                attention_mask=mask,
                position_ids=positions,
            )
            stream = (output[0] if isinstance(output, tuple) else output)[0]
            normed = norms["norm"](stream)
            return target.head(normed), normed if feeds_normed else stream


def check(twins: Twins, head: HeadModel, target: DecoderModel, *, feeds_normed: bool) -> None:
    """Text, then two levels of a tree, whose rows carry the head's own output."""
    text, nodes = make_tokens(NUM_TEXT), make_tokens(len(PARENTS), seed=1)
    rows = Rows(token_ids=text, num_computed=0, block_table=make_table(0))
    taps = run(target, new_cache(target), rows, taps=head.tap_layers).taps
    assert taps is not None
    features = head.features_of_taps(taps)
    cache, table = new_cache(head), make_table(1)
    nothing = torch.tensor([]).long()
    piece = Rows(token_ids=text[:-1], num_computed=0, block_table=table)
    run(head, cache, piece, rows=nothing, features=features[:-1])
    nodes[0] = text[-1]
    start = NUM_TEXT - 1
    carried, ours = {0: features[-1]}, {0: features[-1]}
    done = 0
    for level in ([0], [1, 2], [3, 4]):
        rows = tree_rows(nodes[level], table, start=start, first=done)
        output = run(head, cache, rows, features=torch.stack([ours[node] for node in level]))
        done += len(level)
        for row, node in enumerate(level):
            path = ancestors_of(node)
            hidden = torch.cat((features[:-1], torch.stack([carried[each] for each in path])))
            logits, stream = twins.reference(
                torch.cat((text[:-1], nodes[path])), hidden, target, feeds_normed=feeds_normed
            )
            assert (output.logits[row] - logits[-1]).abs().max() < 1e-3
            assert (output.hidden[row] - stream[-1]).abs().max() < 1e-3
            for child in (each for each, parent in enumerate(PARENTS) if parent == node):
                carried[child], ours[child] = stream[-1], output.hidden[row]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5"])
def test_qwen(name: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, name)
    plain = DecoderModel.load(str(twins.large))
    twins.put_into_checkpoint(twins.named(QWEN, "mtp.", "mtp.layers.0."))
    target = DecoderModel.load(str(twins.large))
    assert target.num_parameters == plain.num_parameters  # the head is left alone
    head = read_head("mtp", target)
    assert head.kind == "mtp"
    assert head.tap_layers == (3,)
    assert head.target_token_ids is None
    check(twins, head, target, feeds_normed=True)


def test_glm_and_deepseek(tmp_path: Path) -> None:
    """A mixture of experts, in a layer behind the last."""
    twins = Twins(tmp_path, "glm4-moe")
    edit_config(twins.large, num_nextn_predict_layers=1)
    prefix = "model.layers.3."
    copies = {
        f"{prefix}embed_tokens.weight": torch.zeros(2),
        f"{prefix}shared_head.head.weight": torch.zeros(2),
    }
    twins.put_into_checkpoint(twins.named(LAST_LAYER, prefix, prefix) | copies)
    target = DecoderModel.load(str(twins.large))
    check(twins, read_head("mtp", target), target, feeds_normed=False)


def test_a_head_that_speculators_saved(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "qwen3")
    target = DecoderModel.load(str(twins.large))
    tensors = twins.named(SPECULATORS, "mtp_layers.0.", "mtp_layers.0.")
    config = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "target_fingerprint": target.fingerprint,
        "transformer_layer_config": twins.other.config.to_dict(),
    }
    path = write_head(tmp_path / "head", tensors, config)
    check(twins, read_head(path, target), target, feeds_normed=True)
    write_head(tmp_path / "head", tensors, {**config, "target_fingerprint": "0" * 16})
    with pytest.raises(HeadError, match="delete target_fingerprint"):
        read_head(path, target)
    config["transformer_layer_config"]["hidden_size"] = 128
    write_head(tmp_path / "head", tensors, config)
    with pytest.raises(HeadError, match=r"hidden_size = 128, but .* has 64"):
        read_head(path, target)


def test_a_checkpoint_without_one(tmp_path: Path) -> None:
    save_hf_model("llama2", tmp_path)
    with pytest.raises(HeadError, match=r"has no MTP head: .* mtp\.fc\.weight or model\.layers\.3"):
        read_head("mtp", DecoderModel.load(str(tmp_path)))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "qwen3")
    prefix = "model.layers.3."
    target = DecoderModel.load(str(twins.large))
    latent = {f"{prefix}self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)}
    twins.put_into_checkpoint(twins.named(LAST_LAYER, prefix, prefix) | latent)
    with pytest.raises(HeadError, match="latent attention"):
        read_head("mtp", target)
