"""Measures the pair on held-out tasks: accuracy, agreement, and data for the router."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draft.corpus import load_tokenizer
from draft.tasks import DIFFICULTIES, FAMILIES, Task, check, stream
from draft.training import load_model


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How much to measure; the longest canonical answer has about 200 tokens."""

    tasks_per_cell: int = 30
    router_rows: int = 3000
    max_answer_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint of the pair, ready to answer."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "Model":
        """Load a published folder in its own bf16 precision, as the engine does."""
        network = load_model(folder, torch.bfloat16, device)
        return cls(network=network, tokenizer=load_tokenizer(folder))


def heldout_tasks(seed: int, per_cell: int) -> list[Task]:
    """per_cell held-out tasks of distinct prompts for every family and difficulty."""
    tasks: dict[str, Task] = {}
    for family in FAMILIES:
        for difficulty in DIFFICULTIES:
            source = stream(seed, "heldout", [family], [difficulty])
            cell: dict[str, Task] = {}
            # A small cell may hold fewer distinct prompts than asked for.
            for _ in range(200 * per_cell):
                task = next(source)
                cell[task.prompt] = task
                if len(cell) == per_cell:
                    break
            tasks |= cell
    return list(tasks.values())


def answer_all(
    model: Model, tasks: Sequence[Task], max_answer_tokens: int, batch_size: int = 64
) -> list[str]:
    """Greedy answers to the tasks as single-turn chats, in the order given."""
    # Answers of similar length share a batch, so few rows wait for the longest. A model that writes
    # twice as much as the canonical answer has lost its way: it is cut there.
    lengths = [len(model.tokenizer.encode(task.answer)) for task in tasks]
    order = sorted(range(len(tasks)), key=lengths.__getitem__)
    answers = [""] * len(tasks)
    for start in tqdm(range(0, len(order), batch_size), desc="answers", leave=False):
        chosen = order[start : start + batch_size]
        limit = min(max_answer_tokens, 16 + 2 * lengths[chosen[-1]])
        texts = _answer(model, [tasks[i].prompt for i in chosen], limit)
        for i, text in zip(chosen, texts, strict=True):
            answers[i] = text
    return answers


def _answer(model: Model, prompts: Sequence[str], max_answer_tokens: int) -> list[str]:
    # transformers' types do not follow return_dict, nor a class that gains generate by mixin.
    tokenizer, network = cast(Any, model.tokenizer), cast(Any, model.network)
    tokenizer.padding_side = "left"
    encoded = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.network.device)
    with torch.inference_mode():
        output = network.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=False,
            max_new_tokens=max_answer_tokens,
        )  # [rows, prompt + answer]
    answers = output[:, encoded["input_ids"].shape[1] :]
    texts: list[str] = model.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def agreement(
    small: Model, large: Model, prompts: Sequence[str], answers: Sequence[str]
) -> list[float]:
    """Per prompt: share of the large model's answer tokens that are the small model's first choice.

    Teacher-forced on the large model's own greedy answers, the end token included. That is the
    chance that a draft of one token is accepted at temperature 0.
    """
    shares = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            ids = large.tokenizer.apply_chat_template(messages, return_dict=False)
            start = len(
                large.tokenizer.apply_chat_template(
                    messages[:1], add_generation_prompt=True, return_dict=False
                )
            )
            input_ids = torch.tensor([ids], device=small.network.device)
            logits = small.network(input_ids=input_ids).logits[0]  # [length, vocab_size]
            guesses = logits[start - 1 : -1].argmax(-1)
            shares.append((guesses == input_ids[0, start:]).float().mean().item())
    return shares


def evaluate_pair(pair: Path, plan: EvaluationPlan, device: torch.device) -> dict[str, Any]:
    """Accuracy of both models and their agreement, by family and difficulty (shares, 0 to 1)."""
    small, large = (Model.load(pair / name, device) for name in ("small", "large"))
    tasks = heldout_tasks(plan.seed, plan.tasks_per_cell)
    answers = {
        name: answer_all(model, tasks, plan.max_answer_tokens)
        for name, model in (("small", small), ("large", large))
    }
    correct = {
        name: [float(check(task, text)) for task, text in zip(tasks, texts, strict=True)]
        for name, texts in answers.items()
    }
    shares = agreement(small, large, [task.prompt for task in tasks], answers["large"])
    measures = {**correct, "agreement": shares}

    def average(family: str | None, difficulty: int | None) -> dict[str, Any]:
        places = [
            i
            for i, task in enumerate(tasks)
            if family in (None, task.family) and difficulty in (None, task.difficulty)
        ]
        means = {name: _mean([values[i] for i in places]) for name, values in measures.items()}
        return {"family": family, "difficulty": difficulty, "tasks": len(places), **means}

    return {
        "tasks": len(tasks),
        "seed": plan.seed,
        "overall": average(None, None),
        "by_difficulty": [average(None, difficulty) for difficulty in DIFFICULTIES],
        "cells": [
            average(family, difficulty) for family in FAMILIES for difficulty in DIFFICULTIES
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def write_router_data(
    pair: Path, destination: Path, plan: EvaluationPlan, device: torch.device
) -> None:
    """JSON lines of held-out prompts with what each model made of them, for training a router."""
    # Another seed than the evaluation's, so that a router is not trained on what judges the pair.
    source, drawn = stream(plan.seed + 1, "heldout"), dict[str, Task]()
    while len(drawn) < plan.router_rows:
        task = next(source)
        drawn[task.prompt] = task
    tasks = list(drawn.values())
    answers = [
        answer_all(Model.load(pair / name, device), tasks, plan.max_answer_tokens)
        for name in ("small", "large")
    ]
    partial = destination.with_suffix(".partial")
    with partial.open("w") as file:
        for task, weak, strong in zip(tasks, *answers, strict=True):
            row = {
                "prompt": task.prompt,
                "family": task.family,
                "difficulty": task.difficulty,
                "weak_correct": int(check(task, weak)),
                "strong_correct": int(check(task, strong)),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.replace(destination)
