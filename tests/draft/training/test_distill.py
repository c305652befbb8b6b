"""A drafter distilled from a large model: data, answers, targets, training, what is written."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import draft
from outrider.draft.training import own_answers
from outrider.draft.training.distill import (
    DistillError,
    DistillPlan,
    collate,
    default_shape,
    distil,
    fresh_drafter,
    measure_agreement,
    shuffled_batches,
    soft_target_loss,
    split_rows,
)
from outrider.draft.training.drafter_job import (
    DrafterJob,
    OutFolderError,
    open_folder,
    train_drafter,
)
from outrider.draft.training.loop import Progress, TrainingPlan
from outrider.draft.training.own_answers import (
    AnswerPlan,
    TaughtRow,
    TokenRow,
    given_answers,
    teach,
    write_answers,
)
from outrider.draft.training.prompt_file import PromptDataError, PromptRow, read_prompts
from outrider.draft.training.tasks.families import stream
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ModelRunner
from tests.models import save_hf_model

PAIR = Path(draft.__file__).parent / "pair"
CPU = torch.device("cpu")
ANSWERS = AnswerPlan(max_tokens=24, max_length=128, top_k=8, stop_token_ids=(2,))
PLAN = DistillPlan(steps=12, batch_size=4, learning_rate=1e-2, held_out=0.2)

Load = Callable[[], tuple[Engine, ModelRunner]]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with the shipped tokenizer."""
    folder = tmp_path_factory.mktemp("large")
    save_hf_model("qwen3", folder, seed=3, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(PAIR / "large" / name, folder)
    return folder


@pytest.fixture(scope="module")
def runner(large: Path) -> ModelRunner:
    return ModelRunner(model=DecoderModel.load(str(large), dtype="float32"), num_blocks=128)


@pytest.fixture(scope="module")
def load(runner: ModelRunner) -> Load:
    def loaded() -> tuple[Engine, ModelRunner]:
        return Engine(runners={"large": runner}), runner

    return loaded


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"What is {number} + {number % 7}?"} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def taught(
    large: Path, load: Load, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[TaughtRow]:
    folder = tmp_path_factory.mktemp("work")
    engine, runner = load()
    tokenizer = AutoTokenizer.from_pretrained(large)
    rendered = own_answers.render_prompts(read_prompts(prompts), tokenizer)
    rows = write_answers(engine, rendered, ANSWERS, folder / "answers.jsonl")
    return teach(runner, rows, ANSWERS.top_k, folder / "targets")


@pytest.fixture
def job(large: Path, prompts: Path, tmp_path: Path) -> DrafterJob:
    return DrafterJob(
        large=str(large),
        data=prompts,
        out=tmp_path / "drafter",
        num_layers=1,
        hidden_size=32,
        answers=ANSWERS,
        distill=PLAN,
    )


# ---- data -----------------------------------------------------------------------------------


def test_prompts_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "c", "answer": "d", "other": 1},
        {"text": "e"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_prompts(tmp_path / "a.jsonl") == [
        PromptRow(messages=(("user", "a"),), answer="b"),
        PromptRow(messages=(("user", "c"),), answer="d"),
        PromptRow(text="e"),
    ]
    (tmp_path / "b.csv").write_text("prompt,response\nx,y\n")
    assert read_prompts(tmp_path / "b.csv") == [PromptRow(messages=(("user", "x"),), answer="y")]
    (tmp_path / "c.txt").write_text("first\n\nsecond\n")
    assert [row.messages[0][1] for row in read_prompts(tmp_path / "c.txt")] == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.jsonl", None, "no such file"),
        ("a.parquet", "x", "must end in one of .jsonl"),
        ("a.jsonl", "", r'is empty; write .*{"prompt"'),
        ("a.csv", "prompt,answer\n", "is empty; write a line of column names"),
        ("a.txt", "\n", "is empty; write a prompt a line"),
        ("a.jsonl", "{]\n", "line 1: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: must be a JSON object"),
        ("a.jsonl", '{"question": "x"}\n', "line 1: no messages, prompt or text; it has question"),
        ("a.jsonl", '{"messages": "x"}\n', "messages must be a list"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "needs a role and a content"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "x"}]}\n',
            "no message of the user",
        ),
    ],
)
def test_data_that_cannot_be_used_is_named(
    name: str, text: str | None, why: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PromptDataError, match=why):
        read_prompts(tmp_path / name)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Permission denied")

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PromptDataError, match="Permission denied"):
        read_prompts(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"prompt": "Hi"}'), ("a.csv", "prompt\nHi\n"), ("a.txt", "Hi")],
)
def test_a_byte_order_mark_is_no_part_of_the_data(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_prompts(tmp_path / name) == [PromptRow(messages=(("user", "Hi"),))]


def test_given_answers_end_as_the_large_model_would_end_them(large: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(large)
    rows = [PromptRow(messages=(("user", "Hi"),), answer="Hello"), PromptRow(text="One two")]
    chat, plain = given_answers(rows, tokenizer, 64)
    text = tokenizer.decode(chat.token_ids)
    assert text == "<|bos|><|user|>Hi<|end|><|assistant|>Hello<|end|>"
    assert tokenizer.decode(chat.token_ids[chat.num_prompt_tokens :]) == "Hello<|end|>"
    assert plain.num_prompt_tokens == 1
    with pytest.raises(PromptDataError, match=r"row 1 has no answer.*--on-policy"):
        given_answers([PromptRow(messages=(("user", "Hi"),))], tokenizer, 64)


# ---- the large model's answers and targets --------------------------------------------------


@pytest.mark.slow
def test_answers_are_the_large_models_own_and_survive_a_restart(
    large: Path, load: Load, tmp_path: Path
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(large)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 9, 30)]
    cache = tmp_path / "answers.jsonl"
    rows = write_answers(load()[0], prompts, ANSWERS, cache)
    for row, prompt in zip(rows, prompts, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=2
        )[0]
        assert list(row.token_ids) == expected.tolist()
        assert row.num_prompt_tokens == len(prompt)
    # The second of three was lost and the third cut off: both are written again, the first is not.
    lines = cache.read_text().splitlines(keepends=True)
    by_index = {json.loads(line)["index"]: line for line in lines}
    marked = json.dumps({"index": 0, "answer": [7, 7]}) + "\n"
    cache.write_text(marked + by_index[2][:9])
    again = write_answers(load()[0], prompts, ANSWERS, cache)
    assert again[0].token_ids == (*prompts[0], 7, 7)
    assert again[1:] == rows[1:]
    assert len(cache.read_text().splitlines()) == 3


def test_sampled_answers_depend_on_the_seed_and_the_row(load: Load, tmp_path: Path) -> None:
    sampled = replace(ANSWERS, temperature=1.0)
    prompts = [(5, 6, 7)] * 2

    def answers(name: str, seed: int) -> list[tuple[int, ...]]:
        plan = replace(sampled, seed=seed)
        rows = write_answers(load()[0], prompts, plan, tmp_path / name)
        return [row.token_ids for row in rows]

    first = answers("a", 1)
    assert first == answers("b", 1)
    assert first[0] != first[1]
    assert first != answers("c", 9)


def test_prompts_without_room_for_an_answer_are_left_out(load: Load, tmp_path: Path) -> None:
    prompts = [tuple(range(5, 5 + length)) for length in (0, 127, 128, 200)]
    rows = write_answers(load()[0], prompts, ANSWERS, tmp_path / "answers.jsonl")
    assert [row.num_prompt_tokens for row in rows] == [127]
    assert len(rows[0].token_ids) == 128


def test_targets_are_the_large_models_best_candidates(
    large: Path, runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_answers, "_MAX_LOGITS", 2048 * 7)  # seven rows a pass
    reference: Any = AutoModelForCausalLM.from_pretrained(large)
    rows = [
        TokenRow(token_ids=tuple(range(9, 9 + length)), num_prompt_tokens=3) for length in (20, 11)
    ]
    found = teach(runner, rows, 8, tmp_path)
    for row, taught in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([row.token_ids])).logits[0, :-1]
        best = logits.log_softmax(-1).topk(8)
        assert torch.equal(taught.top_ids[1:], best.indices.int())
        torch.testing.assert_close(taught.top_logprobs[1:], best.values, atol=5e-3, rtol=0)
    assert runner.pool.num_used == 0

    def not_again(*_: object) -> None:
        raise AssertionError("targets that are there were computed again")

    monkeypatch.setattr(runner, "forward", not_again)
    assert torch.equal(teach(runner, rows, 8, tmp_path)[1].top_ids, found[1].top_ids)


# ---- training -------------------------------------------------------------------------------


def test_the_loss_is_the_divergence_over_candidates_and_the_rest(large: Path) -> None:
    student = fresh_drafter(large, num_layers=1, hidden_size=32, seed=0)
    token_ids = torch.tensor([[5, 6, 7]])
    weights = torch.tensor([[0.0, 0.0, 1.0]])
    with torch.no_grad():
        log_draft = student(token_ids).logits[0, 1].log_softmax(-1)
    top_ids = torch.zeros(1, 3, 2, dtype=torch.int64)
    top_ids[0, 2] = torch.tensor([11, 12])
    top_logprobs = torch.full((1, 3, 2), -9.0)
    top_logprobs[0, 2] = torch.tensor([0.6, 0.3]).log()
    known = log_draft[[11, 12]].exp()
    expected = (
        0.6 * math.log(0.6 / known[0])
        + 0.3 * math.log(0.3 / known[1])
        + 0.1 * math.log(0.1 / (1 - known.sum()))
    )
    found = soft_target_loss(student, CPU)(token_ids, weights, top_ids, top_logprobs)
    assert found.item() == pytest.approx(expected, rel=0.01)  # bfloat16 products


def test_the_loss_is_zero_at_the_large_model_itself(large: Path, taught: list[TaughtRow]) -> None:
    teacher: Any = AutoModelForCausalLM.from_pretrained(large, attn_implementation="eager")
    student = fresh_drafter(large, num_layers=1, hidden_size=32, seed=0)
    batch = collate(taught[:4])
    assert soft_target_loss(teacher, CPU)(*batch).item() < 0.05
    assert soft_target_loss(student, CPU)(*batch).item() > 0.5
    assert measure_agreement(teacher, taught, CPU).first == 1.0


def test_an_epoch_has_every_row_once_and_depends_on_the_step_alone() -> None:
    rows = [
        TaughtRow(
            token_ids=torch.arange(length),
            num_prompt_tokens=1,
            top_ids=torch.zeros(length, 2, dtype=torch.int32),
            top_logprobs=torch.zeros(length, 2),
        )
        for length in range(2, 25)
    ]
    plan = TrainingPlan(steps=100, peak_lr=1.0)
    draw, again = (shuffled_batches(rows, 4, seed=1) for _ in range(2))
    lengths = []
    for step in range(6):
        weights = draw(plan, Progress(step=step))[1]
        lengths += (weights.sum(1) + 1).int().tolist()
    assert sorted(lengths) == list(range(2, 25))
    first, second = draw(plan, Progress(step=8)), again(plan, Progress(step=8))
    assert torch.equal(first[0], second[0])


@pytest.mark.slow
def test_an_interrupted_run_ends_where_an_unbroken_one_does(
    large: Path, taught: list[TaughtRow], tmp_path: Path
) -> None:
    plan = replace(PLAN, checkpoint_minutes=0.0)

    def run(folder: Path, stop_at: int | None = None) -> dict[str, torch.Tensor]:
        model = fresh_drafter(large, num_layers=1, hidden_size=32, seed=0)
        if stop_at is not None:

            def stop(module: object, inputs: object) -> None:
                nonlocal stop_at
                assert stop_at is not None
                stop_at -= 1
                if stop_at < 0 and model.training:
                    raise KeyboardInterrupt

            model.register_forward_pre_hook(stop)
            model.model.register_forward_pre_hook(stop)
        distil(model, taught, plan, folder, device=CPU)
        return dict(model.state_dict())

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", stop_at=7)
    done = json.loads((tmp_path / "broken" / "summary.json").read_text())["step"]
    assert 0 < done < 12
    resumed = run(tmp_path / "broken")
    for name, weights in whole.items():
        assert torch.equal(weights, resumed[name]), name


def test_rows_are_held_out_and_too_few_are_refused(taught: list[TaughtRow]) -> None:
    learnt, held_out = split_rows(taught, PLAN)
    assert len(held_out) == 4
    assert len(learnt) == len(taught) - 4
    assert not {id(row) for row in learnt} & {id(row) for row in held_out}
    with pytest.raises(DistillError, match=r"1 usable sequence.*Give more prompts"):
        split_rows(taught[:1], PLAN)


def test_a_drafters_shape_follows_from_the_large_models() -> None:
    class Large:
        num_hidden_layers = 36
        hidden_size = 4096

    shape = default_shape(Large, num_layers=None, hidden_size=None)
    assert (shape.num_layers, shape.hidden_size, shape.head_dim) == (4, 1024, 64)
    assert shape.num_heads * shape.head_dim == 1024
    with pytest.raises(DistillError, match="--width 100 must be a multiple of 16"):
        default_shape(Large, num_layers=1, hidden_size=100)


# ---- from beginning to end ------------------------------------------------------------------


@pytest.mark.slow
def test_a_drafter_is_made_loads_and_agrees_more_than_before(
    job: DrafterJob, tmp_path: Path
) -> None:
    """Of the shipped large model: one of random weights is learnt by heart and teaches nothing."""
    tasks = stream(5, "train")
    prompts = tmp_path / "tasks.txt"
    # One prompt a line, and some of the tasks have several.
    lines = (next(tasks).prompt.replace("\n", " ") for _ in range(40))
    prompts.write_text("".join(f"{line}\n" for line in lines))
    runner = ModelRunner(model=DecoderModel.load(str(PAIR / "large")), num_blocks=512)

    def load() -> tuple[Engine, ModelRunner]:
        return Engine(runners={"large": runner}), runner

    job = replace(
        job,
        large=str(PAIR / "large"),
        data=prompts,
        hidden_size=64,
        distill=replace(PLAN, steps=60, batch_size=8),
    )
    report = train_drafter(job, load)
    assert report.after.first > report.before.first + 0.1
    assert report.after.top3 >= report.after.first
    assert (report.num_learnt, report.num_held_out, report.steps) == (32, 8, 60)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (job.out / name).read_bytes() == (PAIR / "large" / name).read_bytes()
    card = (job.out / "README.md").read_text()
    assert f"| after | {100 * report.after.first:.1f} |" in card
    model: Any = AutoModelForCausalLM.from_pretrained(job.out)
    assert model.config.vocab_size == 2048
    ours = DecoderModel.load(str(job.out))
    assert ours.num_parameters == report.num_parameters
    stored = load_file(job.out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}  # as the large model's
    # Resumed when it is done, it changes nothing.
    train_drafter(job, load, resume=True)
    again = load_file(job.out / "model.safetensors")
    assert all(torch.equal(stored[name], again[name]) for name in stored)


@pytest.mark.slow
def test_a_drafter_can_start_from_another(
    job: DrafterJob, load: Load, tmp_path: Path, large: Path
) -> None:
    train_drafter(job, load)
    other = replace(
        job, out=tmp_path / "second", small=str(job.out), num_layers=None, hidden_size=None
    )
    first = load_file(job.out / "model.safetensors")
    report = train_drafter(replace(other, distill=replace(PLAN, steps=1)), load)
    assert report.before.first > 0
    second = load_file(other.out / "model.safetensors")
    assert first.keys() == second.keys()
    with pytest.raises(DistillError, match="--layers and --width are for a new drafter"):
        train_drafter(replace(other, num_layers=2, out=tmp_path / "third"), load)


def test_a_start_with_another_tokenizer_is_refused(
    job: DrafterJob, load: Load, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(PAIR / "small", start)
    document = json.loads((start / "tokenizer.json").read_text())
    names = list(document["model"]["vocab"])
    vocabulary = document["model"]["vocab"]
    vocabulary[names[20]], vocabulary[names[21]] = vocabulary[names[21]], vocabulary[names[20]]
    (start / "tokenizer.json").write_text(json.dumps(document))
    wrong = replace(job, small=str(start), num_layers=None, hidden_size=None)
    with pytest.raises(DistillError, match=r"another tokenizer.*omit --small"):
        train_drafter(wrong, load)
    assert not job.out.exists()


def test_an_out_folder_is_not_overwritten_and_only_resumed_with_the_same_inputs(
    job: DrafterJob,
) -> None:
    open_folder(job, resume=False)
    with pytest.raises(OutFolderError, match=r"is not empty.*--resume"):
        open_folder(job, resume=False)
    open_folder(job, resume=True)
    open_folder(replace(job, distill=replace(PLAN, steps=99)), resume=True)
    with pytest.raises(OutFolderError, match=r"other inputs \(temperature changed\)"):
        open_folder(replace(job, answers=replace(ANSWERS, temperature=1.0)), resume=True)
    (job.work_dir / "inputs.json").unlink()
    with pytest.raises(OutFolderError, match="holds no training to resume"):
        open_folder(job, resume=True)
    file = job.out.parent / "file"
    file.touch()
    with pytest.raises(OutFolderError, match="is a file"):
        open_folder(replace(job, out=file), resume=False)


def test_data_without_answers_leaves_no_folder_behind(job: DrafterJob, load: Load) -> None:
    with pytest.raises(PromptDataError, match="row 1 has no answer"):
        train_drafter(replace(job, on_policy=False), load)
    assert not job.out.exists()
