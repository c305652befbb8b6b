"""Hidden rows that drafters read, and the features that rows of drafters carry."""

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.model.protocol import CausalModel, ForwardOutput
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner, PassOutput
from outrider.kernels.layers.taps import Taps
from outrider.kernels.triton_support import triton, use_kernels
from tests.engine.model.decoder_passes import hf_taps
from tests.engine.passes.twins import (
    Piece,
    device_rows,
    make_twin,
    make_twins,
    poison,
    random_pass,
)
from tests.engines import heldout_prompts, shipped_pair, tiny_pair

MODEL = tiny_pair().small
TAPS = (1, 2, 0)


class Reading:
    """A model that adds its rows' features to their hidden states."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.feature_size = model.config.hidden_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any, features: Tensor, **options: Any) -> ForwardOutput:
        output = self._model.forward(*inputs, **options)
        rows = inputs[5]
        wanted = features if rows is None else features[rows]
        return ForwardOutput(logits=output.logits, hidden=output.hidden + wanted, taps=output.taps)


def same(found: PassOutput, expected: PassOutput) -> None:
    for ours, theirs in (
        (found.logits, expected.logits),
        (found.hidden, expected.hidden),
        (found.taps, expected.taps),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-4)


def in_chunks(runner: ModelRunner, prompt: list[int], ends: list[int]) -> list[PassOutput]:
    view, start, found = runner.new_view(""), 0, []
    view.reserve(len(prompt))
    for end in ends:
        ids = prompt[start:end]
        piece = ForwardSlice(view=view, token_ids=ids, start_slot=start, num_logit_rows=1)
        found.append(runner.forward([piece]))
        start = end
    return found


@pytest.mark.parametrize("tier", ["large", "small"])
def test_taps_of_trained_weights_are_transformers_hidden_states(tier: str) -> None:
    pair = shipped_pair()
    model, reference = getattr(pair, tier), getattr(pair, f"{tier}_reference")
    last = model.config.num_layers
    taps = (0, last // 2, last)
    prompt = list(heldout_prompts(1)[0])
    runner = ModelRunner(model=model, num_blocks=64, taps=taps)
    found = in_chunks(runner, prompt, [5, 6, len(prompt)])
    ours = torch.cat([output.taps for output in found if output.taps is not None])
    theirs = hf_taps(reference, torch.tensor(prompt), taps)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_taps_leave_logits_and_states_alone() -> None:
    model, prompt = shipped_pair("bfloat16").large, list(heldout_prompts(1)[0])
    ends = [4, 5, len(prompt)]
    plain = in_chunks(ModelRunner(model=model, num_blocks=64), prompt, ends)
    tapped = in_chunks(ModelRunner(model=model, num_blocks=64, taps=(0, 3)), prompt, ends)
    for with_taps, without in zip(tapped, plain, strict=True):
        assert torch.equal(with_taps.logits, without.logits)
        assert torch.equal(with_taps.hidden, without.hidden)


def test_nothing_is_kept_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taps, "__init__", lambda *_, **__: pytest.fail("taps are kept"))
    plain, staged = make_twins(MODEL)
    for twin in (plain, staged):
        assert twin.run([Piece(sequence=0, token_ids=[5, 6], num_logit_rows=1)]).taps is None
    graphs = staged.runner._graphs
    assert graphs is not None
    assert graphs._taps is graphs._features is None


@pytest.mark.parametrize(
    ("taps", "message"), [((3,), "no hidden states"), ((-1,), "from 0"), ((1, 1), "once each")]
)
def test_taps_that_a_model_does_not_have_are_refused(taps: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_twin(MODEL, taps=taps)


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", [MODEL, Reading(MODEL)], ids=["taps", "features"])
def test_recorded_passes_are_those_on_the_host(model: CausalModel) -> None:
    """Chunks of prompts and trees, with rows that get no logits."""
    plain, staged = make_twins(model, taps=TAPS)
    rng = random.Random(4)
    for sizes, num_trees in ([9, 4, 1], 0), ([3, 8, 2], 1), ([30, 5], 2):  # 35 are not recorded
        pieces = random_pass(rng, vocab_size=131, sizes=sizes, num_trees=num_trees)
        poison(staged.runner)
        features = torch.randn(sum(sizes), model.feature_size) if model.feature_size else None
        outputs = []
        for twin in (plain, staged):
            slices = [twin.slice_of(piece) for piece in pieces]
            outputs.append(twin.runner.forward(slices, features=features))
            twin.advance(pieces)
        same(outputs[1], outputs[0])
        assert outputs[1].taps is not None
        assert outputs[1].taps.shape == (sum(sizes), 3 * model.config.hidden_size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
@pytest.mark.parametrize(
    "kernels",
    ["reference", pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="none"))],
)
@pytest.mark.parametrize("model", [MODEL, Reading(MODEL)], ids=["taps", "features"])
def test_rows_of_the_device_come_first_with_their_padding(model: CausalModel, kernels: Any) -> None:
    rng = random.Random(7)
    twin = make_twin(model, taps=TAPS)
    trees = random_pass(rng, vocab_size=131, sizes=[4, 3], num_trees=2)
    behind = Piece(sequence=2, token_ids=[8, 9, 10], num_logit_rows=1)
    found, real = device_rows(twin, trees, rng)
    total = found.total_rows
    assert total > 7
    features = torch.randn(total + 3, model.feature_size) if model.feature_size else None
    places = [*real, total, total + 1, total + 2]
    slices = [twin.slice_of(piece) for piece in (*trees, behind)]
    own = None if features is None else features[places]
    expected = twin.runner.forward(slices, features=own)
    with use_kernels(kernels):
        output = twin.runner.forward(slices[2:], found, features)
    assert output.taps is not None
    assert output.taps.shape[0] == total + 3
    for ours, theirs in (
        (output.taps[places], expected.taps),
        (output.hidden[[*real, total]], expected.hidden),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-4)


def test_a_recording_keeps_its_taps() -> None:
    """A CUDA graph keeps addresses only, so this recorder drops all that a pass makes."""

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        gc.collect()
        return lambda: None

    twin = make_twin(MODEL, taps=TAPS)
    with use_kernels("reference"):
        twin.runner.capture_graphs(capture=record, max_rows=8)
    graphs = twin.runner._graphs
    assert graphs is not None
    assert graphs._taps is not None
    kept = graphs._taps.data_ptr()
    found = twin.run([Piece(sequence=0, token_ids=[5, 6, 7], num_logit_rows=1)])
    assert found.taps is not None
    assert found.taps.data_ptr() == kept
