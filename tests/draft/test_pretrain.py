import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import draft
from draft.corpus import SPECIAL_TOKENS, Packer, conversation, train_tokenizer
from draft.pair_training import (
    build_model,
    distillation_loss,
    folder_size_bytes,
    label_loss,
    packed_batches,
)
from draft.pretrain import main
from draft.training import ModelShape, Progress, Trainer, TrainingPlan, learning_rate

PAIR = Path(draft.__file__).parent / "pair"
TINY = ModelShape(
    hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, mlp_size=64
)
PLAN = TrainingPlan(tokens=1024, peak_lr=5e-3, batch_tokens=256, short_length=64, long_length=128)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(seed=0, num_tasks=300, vocab_size=400, max_context=2048)


@pytest.fixture(scope="module")
def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PAIR / "large")


@given(text=st.text())
def test_any_text_survives_the_tokenizer(shipped_tokenizer: Any, text: str) -> None:
    assert shipped_tokenizer.decode(shipped_tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(shipped_tokenizer: Any) -> None:
    tokens = shipped_tokenizer.tokenize("What is 9041 + 77?")
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("904177")


def test_chat_template_renders_what_training_packs(tokenizer: Any) -> None:
    packer, rng = Packer(tokenizer, seed=0), random.Random(0)
    for _ in range(100):
        messages = conversation(rng, max_turns=4)
        ids, weights = packer.encode(messages)
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
        assert len(weights) == len(ids)


def test_chat_template_opens_the_assistants_turn(
    shipped_tokenizer: Any,
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = shipped_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    with pytest.raises(jinja2.TemplateError, match="roles are system, user and assistant"):
        shipped_tokenizer.apply_chat_template([{"role": "pirate", "content": "Arr"}])


def test_weights_count_answers_fully_and_prompts_little(
    tokenizer: Any,
) -> None:
    packer = Packer(tokenizer, seed=0)
    ids, weights = packer.encode(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    )
    answer = len(tokenizer.encode("Hello")) + 1  # the end token is the model's to write
    assert weights[-answer:] == [1.0] * answer
    assert all(weight < 0.5 for weight in weights[:-answer])
    assert ids[-1] == tokenizer.eos_token_id


def test_batches_are_full_and_depend_on_seed_and_index_only(
    tokenizer: Any,
) -> None:
    batch = Packer(tokenizer, seed=1).batch(5, rows=3, length=100)
    again = Packer(tokenizer, seed=1).batch(5, rows=3, length=100)
    assert batch.input_ids.shape == batch.weights.shape == (3, 100)
    assert torch.equal(batch.input_ids, again.input_ids)
    assert not torch.equal(
        batch.input_ids, Packer(tokenizer, seed=1).batch(6, rows=3, length=100).input_ids
    )
    assert (batch.input_ids != tokenizer.pad_token_id).all()
    assert (batch.weights[:, 0] == 0).all()


def test_schedule_warms_up_holds_and_decays_to_zero() -> None:
    plan = TrainingPlan(tokens=1000, peak_lr=1.0, warmup_steps=10, decay_fraction=0.2)
    rates = [
        learning_rate(plan, Progress(step=step, tokens=tokens))
        for step, tokens in ((0, 0), (4, 100), (50, 500), (60, 800), (70, 900), (80, 1000))
    ]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])
    with pytest.raises(ValueError, match="budget"):
        TrainingPlan(peak_lr=1.0)


def test_a_resumed_run_ends_where_an_unbroken_one_does(tokenizer: Any, tmp_path: Path) -> None:
    def train(run_dir: Path, tokens: int) -> Trainer:
        # No decay, no late data: the schedule of the first half must not know where that half ends.
        plan = replace(
            PLAN, tokens=tokens, decay_fraction=1e-9, late_fraction=0.0, long_fraction=0.0
        )
        trainer = Trainer(build_model(TINY, tokenizer, 0), plan, run_dir, CPU)
        trainer.resume()
        draw = packed_batches(Packer(tokenizer, 0))
        trainer.run(label_loss(trainer.model, CPU), draw, lambda: None)
        return trainer

    whole = train(tmp_path / "whole", 2048)
    train(tmp_path / "halves", 1024)
    resumed = train(tmp_path / "halves", 2048)
    assert resumed.progress.step == whole.progress.step == 8
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_training_lowers_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    packer = Packer(tokenizer, seed=0)
    unseen = Packer(tokenizer, seed=99).batch(0, rows=4, length=128)
    plan = replace(PLAN, tokens=12_000)
    trainer = Trainer(build_model(TINY, tokenizer, 0), plan, tmp_path, CPU)
    loss = label_loss(trainer.model, CPU)
    before = loss(unseen.input_ids, unseen.weights).item()
    trainer.run(loss, packed_batches(packer), lambda: None)
    assert loss(unseen.input_ids, unseen.weights).item() < before - 1.0


def test_distillation_loss_is_zero_only_at_the_teacher(
    tokenizer: Any,
) -> None:
    teacher, student = (build_model(TINY, tokenizer, seed) for seed in (0, 1))
    batch = Packer(tokenizer, seed=0).batch(0, rows=2, length=64)
    same = distillation_loss(teacher, teacher, CPU)(batch.input_ids, batch.weights)
    other = distillation_loss(student, teacher, CPU)(batch.input_ids, batch.weights)
    assert same.item() == pytest.approx(0.0, abs=1e-6)
    assert other.item() > 1e-3


@pytest.mark.timeout(120)
def test_quick_pretraining_ends_in_a_loadable_measured_pair(tmp_path: Path) -> None:
    out, run_dir = tmp_path / "pair", tmp_path / "runs" / "pair"
    main(["--quick", "--out", str(out), "--run-dir", str(run_dir)])
    tokenizer: Any = AutoTokenizer.from_pretrained(out / "small")
    model: Any = AutoModelForCausalLM.from_pretrained(out / "small")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] <= prompt["input_ids"].shape[1] + 4
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert len(evaluation["cells"]) == 64
    assert "## Recipe" in (out / "README.md").read_text()
    rows = [
        json.loads(line) for line in (run_dir.parent / "router_data.jsonl").read_text().splitlines()
    ]
    assert rows
    assert set(rows[0]) == {"prompt", "family", "difficulty", "weak_correct", "strong_correct"}


@pytest.fixture(scope="module")
def shipped_models() -> dict[str, Any]:
    return {name: AutoModelForCausalLM.from_pretrained(PAIR / name) for name in ("large", "small")}


def test_shipped_pair_fits_its_limits(shipped_models: dict[str, Any]) -> None:
    assert sum(folder_size_bytes(PAIR / name) for name in shipped_models) <= 40_000_000
    parameters = {
        name: sum(p.numel() for p in model.parameters()) for name, model in shipped_models.items()
    }
    assert parameters["large"] >= 8 * parameters["small"]
    for name, model in shipped_models.items():
        config = json.loads((PAIR / name / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config["vocab_size"] == model.get_input_embeddings().weight.shape[0]
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_shipped_pair_shares_one_tokenizer() -> None:
    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for file in files:
        assert (PAIR / "large" / file).read_bytes() == (PAIR / "small" / file).read_bytes()
    tokenizer: Any = AutoTokenizer.from_pretrained(PAIR / "small")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.eos_token == "<|end|>"


def test_the_shipped_large_model_answers_easy_tasks(
    shipped_models: dict[str, Any], shipped_tokenizer: Any
) -> None:
    prompt = shipped_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = shipped_models["large"].generate(**prompt, max_new_tokens=64, do_sample=False)
    assert "Answer: 12." in shipped_tokenizer.decode(output[0])
