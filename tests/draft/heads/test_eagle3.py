"""EAGLE-3 heads against their published forward pass: text, levels of a tree, both layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft.heads.protocol import HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.triton_support import use_kernels
from tests.draft.heads.head_files import (
    HIDDEN,
    VOCAB,
    Weights,
    eagle3_features,
    eagle3_reference,
    eagle3_weights,
    layer_fields,
    make_target,
    specforge_config,
    specforge_names,
    speculators_config,
    write_head,
)
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
from tests.engine.passes.twins import record_eagerly

NUM_TEXT = 11
LEVELS = ([0], [1, 2], [3, 4, 5], [6], [7, 8], [9])  # each behind what it hangs on

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "norm_before_fc": ({"norms": "norm_before_fc"}, {"norm_before_fc": True}),
    "3.1": ({"norms": "fc_norm"}, {"fc_norm": True, "norm_output": True}),
    "qk_norm": ({"qk_norm": True, "num_layers": 2}, {}),
    "own_width": ({"width": 96, "own_embedding": True}, {"target_hidden_size": HIDDEN}),
    "all_tokens": ({"num_tokens": VOCAB}, {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return make_target(tmp_path_factory.mktemp("target"))


class Twins:
    """A head, and what its published forward pass is run with."""

    def __init__(
        self, folder: Path, target: DecoderModel, weights: Weights, config: dict[str, Any]
    ) -> None:
        self.head: HeadModel = read_head(write_head(folder, weights, config), target)
        self.weights = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()}
        self.config = layer_fields(self.weights) | config
        self.embedding = self.weights.get("embed_tokens.weight", target.embedding)

    def reference(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, sees: Tensor
    ) -> tuple[Tensor, Tensor]:
        return eagle3_reference(
            self.weights, self.config, self.embedding, token_ids, features, positions, sees
        )


def make_twins(folder: Path, target: DecoderModel, variant: str) -> Twins:
    options, changes = VARIANTS[variant]
    weights = eagle3_weights(**options)
    return Twins(folder, target, weights, speculators_config(weights, **changes))


def check_levels(twins: Twins, taps: Tensor) -> None:
    """A text in two chunks, then a tree level by level, as a drafter runs them.

    Rows of a level carry the head's own hidden rows of the level above.
    """
    head = twins.head
    text, nodes = make_tokens(NUM_TEXT), make_tokens(len(PARENTS), seed=1)
    nodes[0] = text[-1]  # the tree's root is the text's last row
    cache, table = new_cache(head), make_table(1)
    features = head.features_of_taps(taps)
    expected = eagle3_features(twins.weights, taps)
    assert (features - expected).abs().max() < 1e-4
    for piece in (slice(0, 4), slice(4, NUM_TEXT - 1)):
        rows = Rows(token_ids=text[piece], num_computed=piece.start, block_table=table)
        before = features[piece].clone()
        run(head, cache, rows, rows=torch.tensor([]).long(), features=features[piece])
        assert torch.equal(features[piece], before), "a pass changed its features"
    start = NUM_TEXT - 1
    hidden: dict[int, Tensor] = {}
    theirs: dict[int, Tensor] = {-1: expected[-1]}
    done = 0
    for level in LEVELS:
        own = [hidden[PARENTS[node]] if node else features[-1] for node in level]
        rows = tree_rows(nodes[level], table, start=start, first=done)
        output = run(head, cache, rows, features=torch.stack(own))
        done += len(level)
        for row, node in enumerate(level):
            logits, theirs[node] = path_reference(twins, text, nodes, expected, theirs, node)
            assert output.logits.dtype == torch.float32
            assert (output.logits[row] - logits).abs().max() < 1e-3
            assert (output.hidden[row] - theirs[node]).abs().max() < 1e-3
            hidden[node] = output.hidden[row]


def path_reference(
    twins: Twins,
    text: Tensor,
    nodes: Tensor,
    features: Tensor,
    hidden: dict[int, Tensor],
    node: int,
) -> tuple[Tensor, Tensor]:
    """Logits and hidden row of a node: its path behind the text, as a plain sequence."""
    path = ancestors_of(node)
    token_ids = torch.cat((text[:-1], nodes[path]))
    carried = [hidden[PARENTS[each]] for each in path]
    rows = torch.cat((features[:-1], torch.stack(carried)))
    count = len(token_ids)
    logits, own = twins.reference(
        token_ids, rows, torch.arange(count), torch.ones(count, count).tril().bool()
    )
    return logits[-1], own[-1]


def make_taps(target: DecoderModel, head: HeadModel, count: int = NUM_TEXT) -> Tensor:
    """The large model's own hidden states of a text."""
    rows = Rows(token_ids=make_tokens(count, seed=3), num_computed=0, block_table=make_table(0))
    taps = run(target, new_cache(target), rows, taps=head.tap_layers).taps
    assert taps is not None
    return taps


@pytest.mark.slow_cases
@pytest.mark.parametrize("variant", VARIANTS)
def test_levels_of_a_tree(variant: str, tmp_path: Path, target: DecoderModel) -> None:
    twins = make_twins(tmp_path, target, variant)
    assert twins.head.tap_layers == (1, 2, 3)
    check_levels(twins, make_taps(target, twins.head))


def test_the_layout_of_specforge(tmp_path: Path, target: DecoderModel) -> None:
    """Its names, and its numbers of layers, which count what they put out."""
    weights = specforge_names(eagle3_weights())
    twins = Twins(tmp_path, target, weights, specforge_config(weights))
    assert twins.head.kind == "eagle3"
    assert twins.head.tap_layers == (1, 2, 3)
    check_levels(twins, make_taps(target, twins.head))


@pytest.mark.parametrize("num_tokens", [50, VOCAB])
def test_a_head_beside_weights_in_8_bits_is_held_in_8_bits(num_tokens: int, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    plain, rounded = (
        DecoderModel.load(str(tmp_path / "target"), dtype="bfloat16", rounding=rounding)
        for rounding in (None, Rounding(scheme="int8"))
    )
    weights = eagle3_weights(num_tokens=num_tokens, width=256, own_embedding=True)
    config = speculators_config(weights, target_hidden_size=HIDDEN)
    path = write_head(tmp_path / "head", weights, config)
    taps = torch.randn((4, 3 * HIDDEN), generator=torch.Generator().manual_seed(4)).bfloat16()
    outputs = []
    for target, scheme in ((plain, "bfloat16"), (rounded, "int8")):
        head = read_head(path, target)
        assert head.scheme == scheme
        rows = Rows(token_ids=make_tokens(4), num_computed=0, block_table=make_table(0))
        outputs.append(run(head, new_cache(head), rows, features=head.features_of_taps(taps)))
        sizes = (head.num_parameters, head.weight_bytes)
    assert sizes[1] < 2 * sizes[0]
    likeness = torch.cosine_similarity(outputs[0].logits, outputs[1].logits)
    assert likeness.min() > 0.99


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_triton_computes_what_torch_computes(dtype: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = eagle3_weights(norms="fc_norm")
    path = write_head(
        tmp_path / "head", weights, speculators_config(weights, fc_norm=True, norm_output=True)
    )
    outputs = []
    for kernels, place in (("triton", device), ("reference", "cpu")):
        large = DecoderModel.load(str(tmp_path / "target"), dtype=dtype, device=place)
        head = read_head(path, large)
        cache, table = new_cache(head), make_table(0)
        generator = torch.Generator().manual_seed(4)
        taps = torch.randn((18, 3 * HIDDEN), generator=generator).to(large.dtype)
        with use_kernels(kernels):
            features = head.features_of_taps(taps.to(place))
            prompt = Rows(token_ids=make_tokens(4), num_computed=0, block_table=table)
            run(head, cache, prompt, features=features[:4])
            tree = tree_rows(make_tokens(14, seed=1), table, start=4)
            outputs.append(run(head, cache, tree, features=features[4:]))
    fused, plain = outputs
    bound = 1e-3 if dtype == "float32" else 0.3
    assert (fused.logits.cpu() - plain.logits).abs().max() < bound
    assert (fused.hidden.cpu() - plain.hidden).abs().max() < bound


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
def test_recorded_passes(tmp_path: Path) -> None:
    """With features and hidden rows in the recordings' own memory."""
    make_target(tmp_path / "target")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = eagle3_weights()
    path = write_head(tmp_path / "head", weights, speculators_config(weights))
    generator = torch.Generator().manual_seed(4)
    features = torch.randn((4, HIDDEN), generator=generator).to(device)
    outputs = []
    with use_kernels("triton"):
        head = read_head(path, DecoderModel.load(str(tmp_path / "target"), device=device))
        for is_recorded in (False, True):
            runner = ModelRunner(model=head, num_blocks=16, block_size=4)
            if is_recorded:
                assert runner.capture_graphs(capture=record_eagerly, max_rows=4)
            view = runner.new_view("")
            view.reserve(4)
            piece = ForwardSlice(
                view=view, token_ids=make_tokens(4).tolist(), start_slot=0, num_logit_rows=3
            )
            output = runner.forward([piece], features=features)
            outputs.append((output.logits.clone(), output.hidden.clone()))
    plain, recorded = outputs
    assert (plain[0] - recorded[0]).abs().max() < 1e-4
    assert (plain[1] - recorded[1]).abs().max() < 1e-4


def test_a_runner_runs_it(tmp_path: Path, target: DecoderModel) -> None:
    """Through slices of rows, of which only some want logits."""
    twins = make_twins(tmp_path, target, "plain")
    runner = ModelRunner(model=twins.head, num_blocks=16, block_size=4)
    view = runner.new_view("")
    text = make_tokens(NUM_TEXT)
    view.reserve(NUM_TEXT)
    features = twins.head.features_of_taps(make_taps(target, twins.head))
    piece = ForwardSlice(view=view, token_ids=text.tolist(), start_slot=0, num_logit_rows=2)
    output = runner.forward([piece], features=features)
    sees = torch.ones(NUM_TEXT, NUM_TEXT).tril().bool()
    logits, hidden = twins.reference(text, features, torch.arange(NUM_TEXT), sees)
    assert runner.vocab_size == 50
    assert (output.logits - logits[-2:]).abs().max() < 1e-3
    assert (output.hidden - hidden[-2:]).abs().max() < 1e-3


def test_its_tokens_are_the_targets(tmp_path: Path, target: DecoderModel) -> None:
    twins = make_twins(tmp_path, target, "plain")
    token_ids = twins.head.target_token_ids
    assert token_ids is not None
    assert torch.equal(token_ids, twins.weights["t2d"].nonzero()[:, 0])
    full = make_twins(tmp_path / "full", target, "all_tokens")
    assert full.head.target_token_ids is None


def test_a_table_of_tokens_like_the_targets_is_held_once(
    tmp_path: Path, target: DecoderModel
) -> None:
    weights = eagle3_weights(own_embedding=True)
    weights["embed_tokens.weight"] = target.embedding.clone()
    head: Any = read_head(write_head(tmp_path, weights, speculators_config(weights)), target)
    assert head._embedding is target.embedding
