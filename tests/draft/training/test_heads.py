"""Heads trained on a large model's hidden states: inputs, unrolling, loss, what is written."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.draft.heads.read_head import read_head
from outrider.draft.training.distill import DistillError, DistillPlan
from outrider.draft.training.head_distil import (
    collate_tapped,
    distil_head,
    frequent_tokens,
    measure_acceptance,
    unrolled_loss,
    unrolled_rows,
)
from outrider.draft.training.head_files import default_taps, head_sizes, write_head
from outrider.draft.training.head_job import HeadJob, fresh_head, tapped_runner, train_head
from outrider.draft.training.head_model import TrainedHead, TrainedHeadKind
from outrider.draft.training.own_answers import AnswerPlan, TappedRow, TokenRow, teach
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.models import save_hf_model

CPU = torch.device("cpu")
VOCAB = 131
PLAN = DistillPlan(steps=6, batch_size=4, learning_rate=1e-2, held_out=0.2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_hf_model("llama", folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def runner(large: Path) -> ModelRunner:
    return ModelRunner(model=DecoderModel.load(str(large), dtype="float32"), num_blocks=64)


def taught(runner: ModelRunner, kind: TrainedHeadKind, folder: Path) -> list[TappedRow]:
    draw = torch.Generator().manual_seed(1)
    rows = [
        TokenRow(
            token_ids=tuple(torch.randint(3, 40, (length,), generator=draw).tolist()),
            num_prompt_tokens=4,
        )
        for length in range(8, 20)
    ]
    taps = default_taps(kind, runner.model.config.num_layers)
    found = teach(tapped_runner(runner, taps), rows, 8, folder)
    assert all(isinstance(row, TappedRow) for row in found)
    return [row for row in found if isinstance(row, TappedRow)]


@pytest.fixture(scope="module")
def eagle_rows(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> list[TappedRow]:
    return taught(runner, "eagle3", tmp_path_factory.mktemp("eagle3"))


def test_taps_on_disk_are_the_large_models_hidden_states(
    large: Path, eagle_rows: list[TappedRow]
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(large)
    row = eagle_rows[5]
    with torch.no_grad():
        states = reference(row.token_ids[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in (0, 1, 2)], dim=-1)
    found = row.read_taps()
    torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-4, rtol=1e-4)
    assert not found[-1].any()  # nothing stands behind the last token


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_written_head_computes_what_was_trained(
    kind: TrainedHeadKind, large: Path, runner: ModelRunner, tmp_path: Path
) -> None:
    """The engine's paged pass over text and a chain is the training's unrolled one."""
    rows = taught(runner, kind, tmp_path / "rows")
    vocab = 50 if kind == "eagle3" else VOCAB
    head = fresh_head(kind, large, rows, vocab, seed=0)
    distil_head(head, rows, PLAN, tmp_path / "run", depth=3, device=CPU)
    write_head(head, large, tmp_path / "head", torch.float32)
    read = read_head(str(tmp_path / "head"), runner.model)
    assert (read.kind, read.tap_layers) == (kind, default_taps(kind, 3))

    row = rows[7]
    token_ids, weights, _, _, taps = collate_tapped([row])
    with torch.no_grad():
        unrolled = unrolled_rows(token_ids, weights, taps)
        expected = [head.logits(hidden)[0] for hidden in head.unroll(unrolled, 3)]
    paged = ModelRunner(model=read, num_blocks=16)
    features = read.features_of_taps(taps[0])
    for number, place in enumerate(unrolled.rows[0].tolist()[:-2]):
        view = paged.new_view(f"row {number}")
        view.reserve(place + 4)
        tokens = row.token_ids.tolist()
        text = tokens[1 : place + 2]
        output = _pass(paged, view, text, 0, features[: place + 1])
        for level in range(3):
            logits = output.logits[-1]
            torch.testing.assert_close(logits, expected[level][number], atol=1e-3, rtol=1e-3)
            if level < 2:
                slot = place + 1 + level
                output = _pass(paged, view, [tokens[slot + 1]], slot, output.hidden[-1:].clone())
        view.release()


def _pass(
    runner: ModelRunner, view: Any, token_ids: list[int], start_slot: int, features: Tensor
) -> Any:
    piece = ForwardSlice(view=view, token_ids=token_ids, start_slot=start_slot, num_logit_rows=1)
    return runner.forward([piece], features=features)


@pytest.mark.slow
def test_an_interrupted_run_ends_where_an_unbroken_one_does(
    large: Path, eagle_rows: list[TappedRow], tmp_path: Path
) -> None:
    plan = replace(PLAN, checkpoint_minutes=0.0)

    def run(folder: Path, stop_at: int | None = None) -> TrainedHead:
        head = fresh_head("eagle3", large, eagle_rows, 50, seed=0)
        if stop_at is not None:

            def stop(module: object, inputs: object) -> None:
                nonlocal stop_at
                assert stop_at is not None
                stop_at -= head.training
                if stop_at < 0:
                    raise KeyboardInterrupt

            head.layer.mlp.register_forward_pre_hook(stop)
        distil_head(head, eagle_rows, plan, folder, depth=2, device=CPU)
        return head

    whole = run(tmp_path / "whole").state_dict()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", stop_at=7)
    assert 0 < json.loads((tmp_path / "broken" / "summary.json").read_text())["step"] < 6
    resumed = run(tmp_path / "broken").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_training_makes_deep_guesses_better(
    large: Path, eagle_rows: list[TappedRow], tmp_path: Path
) -> None:
    head = fresh_head("eagle3", large, eagle_rows, VOCAB, seed=0)
    loss = unrolled_loss(head, 3, CPU)
    batch = collate_tapped(eagle_rows)
    before = loss(*batch).item()
    first = measure_acceptance(head, eagle_rows, 3, CPU)
    plan = replace(PLAN, steps=40, batch_size=12)
    distil_head(head, eagle_rows, plan, tmp_path / "run", depth=3, device=CPU)
    assert loss(*batch).item() < 0.8 * before
    after = measure_acceptance(head, eagle_rows, 3, CPU)
    assert after.paths[0] > first.paths[0]
    assert after.num_roots == sum(len(row.token_ids) - 4 for row in eagle_rows)


def test_the_loss_leaves_out_what_the_head_cannot_say(
    large: Path, eagle_rows: list[TappedRow]
) -> None:
    """One place: the divergence of the shares that are left, weighted by how much that is."""
    head = fresh_head("eagle3", large, eagle_rows, 50, seed=0)
    row = eagle_rows[0]
    known = int(head.token_ids[7])
    unknown = next(token for token in range(VOCAB) if token not in head.token_ids.tolist())
    token_ids, weights, top_ids, top_logprobs, taps = collate_tapped([row])
    weights[:, :-1] = 0.0  # the last place only
    top_ids, top_logprobs = top_ids[:, :, :2].clone(), top_logprobs[:, :, :2].clone()
    top_ids[0, -1] = torch.tensor([unknown, known])
    top_logprobs[0, -1] = torch.tensor([0.5, 0.3]).log()
    batch = (token_ids, weights, top_ids, top_logprobs, taps)
    with torch.no_grad():
        hidden = next(iter(head.unroll(unrolled_rows(token_ids, weights, taps), 1)))
        draft = float(head.logits(hidden)[0, 0].softmax(-1)[7])
        found = unrolled_loss(head, 1, CPU)(*batch).item()
    expected = 0.6 * math.log(0.6 / draft) + 0.4 * math.log(0.4 / (1 - draft))
    # Half of the mass is left: a sum weighted by it, over at least one whole place.
    assert found == pytest.approx(0.5 * expected, rel=1e-3)


def test_the_vocabulary_is_what_is_expected_most(eagle_rows: list[TappedRow]) -> None:
    mass = torch.zeros(VOCAB)
    for row in eagle_rows:
        for place in range(row.num_prompt_tokens, len(row.token_ids)):
            for token, logprob in zip(row.top_ids[place], row.top_logprobs[place], strict=True):
                mass[int(token)] += float(logprob.exp())
    expected = sorted(mass.argsort(descending=True)[:20].tolist())
    assert frequent_tokens(eagle_rows, VOCAB, 20).tolist() == expected


def test_a_head_is_made_from_prompts(
    large: Path, runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tuple(range(5, 5 + length)) for length in range(3, 9)]
    monkeypatch.setattr(
        "outrider.draft.training.head_job.AutoTokenizer.from_pretrained", _no_tokenizer
    )
    monkeypatch.setattr(
        "outrider.draft.training.head_job.render_prompts", lambda rows, tokenizer: prompts
    )
    data = tmp_path / "prompts.txt"
    data.write_text("text\n")
    job = HeadJob(
        large=str(large),
        data=data,
        out=tmp_path / "head",
        answers=AnswerPlan(max_tokens=12, max_length=64, top_k=8),
        distill=replace(PLAN, steps=2),
        kind="eagle3",
        draft_vocab_size=60,
        unroll=2,
    )

    def load() -> tuple[Engine, ModelRunner]:
        return Engine(runners={"large": runner}), runner

    report = train_head(job, load)
    assert (report.steps, report.num_held_out) == (2, 1)
    stored = load_file(job.out / "model.safetensors")
    assert torch.equal(stored["d2t"], stored["t2d"].nonzero()[:, 0] - torch.arange(60))
    assert set(stored) == {
        *("d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"),
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(
            f"midlayer.{name}.weight"
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        ),
    }
    config = json.loads((job.out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (60, VOCAB)
    assert "| 2 |" in (job.out / "README.md").read_text()
    # Resumed when it is done, it changes nothing.
    train_head(job, load, resume=True)
    again = load_file(job.out / "model.safetensors")
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    with pytest.raises(DistillError, match="unroll changed"):
        train_head(replace(job, unroll=3), load, resume=True)


def _no_tokenizer(*_: object, **__: object) -> None:
    return None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"draft_vocab_size": 500}, "--draft-vocab 500 must be from 1 to .* 131"),
        ({"kind": "mtp", "draft_vocab_size": 60}, "--draft-vocab is for --kind eagle3"),
        ({"unroll": 0}, "--unroll 0 must be at least 1"),
    ],
)
def test_what_no_head_can_have_is_refused(
    changes: dict[str, Any], why: str, large: Path, tmp_path: Path
) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("text\n")
    job = HeadJob(
        large=str(large),
        data=data,
        out=tmp_path / "head",
        answers=AnswerPlan(),
        distill=PLAN,
        kind="eagle3",
    )

    def load() -> tuple[Engine, ModelRunner]:
        raise AssertionError("nothing is loaded for it")

    with pytest.raises(DistillError, match=why):
        train_head(replace(job, **changes), load)
    assert not job.out.exists()


def test_hidden_states_are_those_that_servers_read_by_default() -> None:
    assert default_taps("eagle3", 36) == (2, 18, 33)
    assert default_taps("eagle3", 3) == (0, 1, 2)
    assert default_taps("mtp", 36) == (36,)


def test_a_layer_beside_experts_is_as_wide_as_its_file_says(runner: ModelRunner) -> None:
    """An MTP file has the large model's config, by which it is read; an EAGLE-3 file its own."""
    config = runner.model.config
    sparse = tuple(replace(layer, is_sparse=True) for layer in config.layers)
    target = replace(config, layers=sparse, intermediate_size=56)
    assert head_sizes("mtp", target, 32).mlp_size == 56
    assert head_sizes("eagle3", target, 32).mlp_size == 3 * config.hidden_size
