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

from outrider import draft
from outrider.draft.training.chat_format import CHAT_TEMPLATE, SPECIAL_TOKENS, with_tools
from outrider.draft.training.corpus import Mix, Packer, conversation, train_tokenizer
from outrider.draft.training.loop import ModelShape, Progress, Trainer, TrainingPlan, learning_rate
from outrider.draft.training.pair_evaluation import Model, agreement, answer_all, heldout_tasks
from outrider.draft.training.pair_training import (
    build_model,
    distillation_loss,
    folder_size_bytes,
    label_loss,
    packed_batches,
    use_causal_attention,
)
from outrider.draft.training.pretrain import main, parse_arguments
from outrider.draft.training.tasks.families import FAMILIES, check, generate, split_of

PAIR = Path(draft.__file__).parent / "pair"
TINY = ModelShape(
    hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, mlp_size=64
)
PLAN = TrainingPlan(tokens=1024, peak_lr=5e-3, batch_tokens=256, short_length=64, long_length=128)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(seed=0, num_tasks=300, vocab_size=400, max_context=4096)


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


def test_chat_template_writes_tools_as_training_does(tokenizer: Any) -> None:
    packer, rng = Packer(tokenizer, seed=0), random.Random(1)
    system = {"role": "system", "content": "Be brief."}
    for i in range(100):
        task = generate("tool_call", 1 + i % 4, rng)
        messages: list[Any] = [*[system] * (i % 2), *task.messages]
        messages.append({"role": "assistant", "content": task.answer})
        ids, _ = packer.encode(with_tools(messages, task.tools))
        assert ids == tokenizer.apply_chat_template(
            messages, tools=list(task.tools), return_dict=False
        )


def rendered(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_chat_template_opens_the_assistants_turn(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(tokenizer, messages, add_generation_prompt=True) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    )
    with pytest.raises(jinja2.TemplateError, match="roles are system, user, assistant and tool"):
        rendered(tokenizer, [{"role": "pirate", "content": "Arr"}])


def test_chat_template_writes_calls_and_results(tokenizer: Any) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call({"x": "ö"}), call('{"y": 1}')]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call({})]},
    ]
    assert rendered(tokenizer, messages).split("\n") == [
        "<|bos|><|user|>Hi<|end|><|assistant|><tool_call>",
        '{"name": "f", "arguments": {"x": "ö"}}',
        "</tool_call>",
        "<tool_call>",
        '{"name": "f", "arguments": {"y": 1}}',
        "</tool_call><|end|><|user|><tool_response>",
        "one",
        "</tool_response>",
        "<tool_response>",
        "two",
        "</tool_response><|end|><|assistant|>Well.",
        "<tool_call>",
        '{"name": "f", "arguments": {}}',
        "</tool_call><|end|>",
    ]


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ({"name": "f"}, "f()"),
        ({"name": "f", "description": "Does it", "parameters": {}}, "f(): Does it"),
        (
            {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {}}}},
            "f(a?: string, b?: any)",
        ),
        (
            {
                "name": "f",
                "parameters": {
                    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": ["string", "null"]}},
                    "required": ["a"],
                },
            },
            "f(a: x|y, b?: any)",
        ),
    ],
)
def test_chat_template_writes_any_tool(tokenizer: Any, function: dict[str, Any], line: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for tool in (function, {"type": "function", "function": function}):
        text = rendered(tokenizer, messages, tools=[tool, tool])
        assert text == f"<|bos|><|system|>Tools:\n{line}\n{line}<|end|><|user|>Hi<|end|>"


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
    assert torch.equal(batch.positions, torch.arange(100).expand(3, -1))


def test_positions_jump_only_where_a_turn_begins(tokenizer: Any) -> None:
    mix = Mix(interviews=0.5, skips=1.0, max_positions=1000)
    batch = Packer(tokenizer, seed=2).batch(0, rows=20, length=200, mix=mix)
    roles = torch.tensor(tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"]))
    roles = torch.cat([roles, torch.tensor([tokenizer.convert_tokens_to_ids("<|system|>")])])
    steps = batch.positions.diff(dim=1)
    assert (steps >= 1).all()
    assert (batch.positions[:, 0] == 0).all()
    assert batch.positions.max() < 1000
    jumps = steps > 1
    assert jumps.any()
    assert torch.isin(batch.input_ids[:, 1:][jumps], roles).all()


def test_interviews_and_weights_shape_what_is_drawn(tokenizer: Any) -> None:
    def texts(mix: Mix) -> str:
        batch = Packer(tokenizer, seed=3).batch(0, rows=20, length=300, mix=mix)
        return str(tokenizer.decode(batch.input_ids.flatten()))

    sums = Mix(family_weights=dict.fromkeys(FAMILIES, 0.0) | {"addition": 1.0})
    text = texts(sums)
    assert "Tools:" not in text
    assert "thousands" in text
    assert "thousands" not in texts(replace(sums, difficulty_weights=(1, 1, 1, 0)))
    assert "hundreds" not in texts(replace(sums, difficulty_weights=(1, 0, 0, 0)))
    asked = texts(replace(sums, interviews=1.0))
    assert asked.count("The text says: ") > 20


def test_no_turn_of_a_training_chat_is_held_out() -> None:
    rng = random.Random(4)
    weights = dict.fromkeys(FAMILIES, 0.0) | {"follow_up": 1.0, "tool_call": 1.0, "addition": 1.0}
    for _ in range(300):
        for message in conversation(rng, 3, Mix(family_weights=weights)):
            assert message["role"] != "user" or split_of(message["content"]) == "train"


def test_block_attention_is_causal_attention(tokenizer: Any) -> None:
    model = build_model(replace(TINY, num_heads=2, num_kv_heads=1, hidden_size=64), tokenizer, 0)
    for length in (100, 300, 600):
        ids = torch.randint(6, 300, (2, length))
        plain = model(input_ids=ids).logits
        use_causal_attention(model)
        positions = torch.arange(length).expand(2, -1)
        torch.testing.assert_close(model(input_ids=ids, position_ids=positions).logits, plain)
        model.set_attn_implementation("eager")


def test_a_jump_in_positions_hides_nothing(tokenizer: Any) -> None:
    model = build_model(TINY, tokenizer, 0)
    use_causal_attention(model)
    ids = torch.randint(6, 300, (1, 60))
    positions = torch.arange(60) + 500 * (torch.arange(60) >= 40)
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 300
    last = [model(input_ids=x, position_ids=positions[None]).logits[0, -1] for x in (ids, changed)]
    assert not torch.equal(*last)


def test_schedule_warms_up_holds_and_decays_to_zero() -> None:
    plan = TrainingPlan(tokens=1000, peak_lr=1.0, warmup_steps=10, decay_fraction=0.2)
    rates = [
        learning_rate(plan, Progress(step=step, tokens=tokens))
        for step, tokens in ((0, 0), (4, 100), (50, 500), (60, 800), (70, 900), (80, 1000))
    ]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])
    with pytest.raises(ValueError, match="budget"):
        TrainingPlan(peak_lr=1.0)


@pytest.mark.slow
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


@pytest.mark.slow
def test_training_lowers_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    packer = Packer(tokenizer, seed=0)
    unseen = Packer(tokenizer, seed=99).batch(0, rows=4, length=128)
    plan = replace(PLAN, tokens=12_000)
    trainer = Trainer(build_model(TINY, tokenizer, 0), plan, tmp_path, CPU)
    loss = label_loss(trainer.model, CPU)
    before = loss(unseen.input_ids, unseen.weights, unseen.positions).item()
    trainer.run(loss, packed_batches(packer), lambda: None)
    assert loss(unseen.input_ids, unseen.weights, unseen.positions).item() < before - 1.0


def test_distillation_loss_is_zero_only_at_the_teacher(
    tokenizer: Any,
) -> None:
    teacher, student = (build_model(TINY, tokenizer, seed) for seed in (0, 1))
    batch = Packer(tokenizer, seed=0).batch(0, rows=2, length=64)
    tensors = (batch.input_ids, batch.weights, batch.positions)
    same = distillation_loss(teacher, teacher, CPU)(*tensors)
    other = distillation_loss(student, teacher, CPU)(*tensors)
    assert same.item() == pytest.approx(0.0, abs=1e-6)
    assert other.item() > 1e-3


@pytest.mark.slow
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
    assert len(evaluation["cells"]) == 4 * len(FAMILIES)
    assert "## Recipe" in (out / "README.md").read_text()
    again = tmp_path / "again"
    main(["--quick", "--stages", "tokenizer", "--init", str(out), "--out", str(again), "--run-dir",
          str(run_dir)])  # fmt: skip
    first, copy = (AutoModelForCausalLM.from_pretrained(f / "large") for f in (out, again))
    for left, right in zip(first.parameters(), copy.parameters(), strict=True):
        assert torch.equal(left, right)


def test_weights_on_the_command_line() -> None:
    arguments = parse_arguments(
        ["--difficulty-weights", "6,3,2,0.5", "--family-weights", "json=2,chat=0"]
    )
    assert arguments.difficulty_weights == (6.0, 3.0, 2.0, 0.5)
    assert arguments.family_weights == {"json": 2.0, "chat": 0.0}
    for wrong in (["--difficulty-weights", "1,2"], ["--family-weights", "poetry=1"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)


@pytest.mark.slow
def test_answers_do_not_depend_on_their_batch(tokenizer: Any) -> None:
    network = build_model(TINY, tokenizer, 0)
    model = Model(network=network, tokenizer=tokenizer)
    tasks = [task for task in heldout_tasks(0, 1) if task.family != "passage"]
    together = answer_all(model, tasks, 6)
    assert together == answer_all(model, tasks, 6, batch_size=1)


@pytest.mark.slow
def test_a_model_agrees_with_its_own_answers_and_less_with_others(
    shipped_models: dict[str, Any], shipped_tokenizer: Any
) -> None:
    large, small = (
        Model(network=shipped_models[name], tokenizer=shipped_tokenizer)
        for name in ("large", "small")
    )
    tasks = [generate("subtraction", 4, random.Random(seed)) for seed in range(8)]
    answers = answer_all(large, tasks, 120)
    own = agreement(large, large, tasks, answers)
    other = agreement(small, large, tasks, answers)
    # Padding moves a bfloat16 tie now and then.
    assert sum(own) > 7.8
    assert 0.5 < sum(other) / 8 < sum(own) / 8


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


def test_the_shipped_pair_knows_the_chat_format_and_long_chats(
    shipped_models: dict[str, Any], shipped_tokenizer: Any
) -> None:
    assert shipped_tokenizer.chat_template == CHAT_TEMPLATE
    assert shipped_tokenizer.model_max_length == 4096
    for model in shipped_models.values():
        assert model.config.max_position_embeddings == 4096


@pytest.mark.slow
def test_the_shipped_large_model_calls_a_tool(
    shipped_models: dict[str, Any], shipped_tokenizer: Any
) -> None:
    large = Model(network=shipped_models["large"], tokenizer=shipped_tokenizer)
    tasks = [generate("tool_call", 1, random.Random(seed)) for seed in range(10)]
    answers = answer_all(large, tasks, 80)
    assert sum(map(check, tasks, answers)) >= 8
