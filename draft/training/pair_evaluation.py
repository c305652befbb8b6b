"""Measures the pair on held-out tasks: accuracy and agreement by family and difficulty."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.draft.training.corpus import load_tokenizer
from outrider.draft.training.loop import load_model
from outrider.draft.training.tasks.families import DIFFICULTIES, FAMILIES, Task, check
from outrider.draft.training.tasks.files import distinct_tasks


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Size of an evaluation; the longest canonical answer has about 200 tokens."""

    tasks_per_cell: int = 30
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
    """per_cell held-out tasks for every family and difficulty; fewer where a cell has no more."""
    return [
        task
        for family in FAMILIES
        for difficulty in DIFFICULTIES
        for task in islice(distinct_tasks(seed, "heldout", [family], [difficulty]), per_cell)
    ]


# Padding and plain attention grow with the longest of a batch: so much at most.
_BATCH_SCORES = 8_000_000


def answer_all(
    model: Model, tasks: Sequence[Task], max_answer_tokens: int, batch_size: int = 64
) -> list[str]:
    """Greedy answers to the tasks, in the order given."""
    prompts = [_prompt_ids(model, task) for task in tasks]
    # Answers of similar length share a batch, so few rows wait for the longest. A model that writes
    # twice as much as the canonical answer has lost its way: it is cut there.
    lengths = [len(model.tokenizer.encode(task.answer)) for task in tasks]
    order = sorted(range(len(tasks)), key=lambda i: (len(prompts[i]) // 256, lengths[i]))
    answers = [""] * len(tasks)
    with tqdm(total=len(tasks), desc="answers", unit="task", leave=False) as bar:
        while order:
            chosen = [order.pop(0)]
            longest = len(prompts[chosen[0]])
            while order and len(chosen) < batch_size:
                longest = max(longest, len(prompts[order[0]]))
                if (len(chosen) + 1) * longest**2 > _BATCH_SCORES:
                    break
                chosen.append(order.pop(0))
            limit = min(max_answer_tokens, 16 + 2 * max(lengths[i] for i in chosen))
            texts = _answer(model, [prompts[i] for i in chosen], limit)
            for i, text in zip(chosen, texts, strict=True):
                answers[i] = text
            bar.update(len(chosen))
    return answers


def _prompt_ids(model: Model, task: Task, answer: str | None = None) -> list[int]:
    """The chat as the template renders it, up to the answer or with it."""
    messages = [*task.messages]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    # transformers' types want plain dicts.
    tokenizer = cast(Any, model.tokenizer)
    ids: list[int] = tokenizer.apply_chat_template(
        messages,
        tools=list(task.tools) or None,
        add_generation_prompt=answer is None,
        return_dict=False,
    )
    return ids


def _answer(model: Model, prompts: Sequence[list[int]], max_answer_tokens: int) -> list[str]:
    # transformers' types do not follow a class that gains generate by mixin.
    network, tokenizer = cast(Any, model.network), cast(Any, model.tokenizer)
    tokenizer.padding_side = "left"
    encoded = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(network.device)
    with torch.inference_mode():
        output = network.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=False,
            max_new_tokens=max_answer_tokens,
        )  # [rows, prompt + answer]
    answers = output[:, encoded["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def agreement(
    small: Model, large: Model, tasks: Sequence[Task], answers: Sequence[str]
) -> list[float]:
    """Per task: share of the large model's answer tokens that are the small model's first choice.

    Teacher-forced on the large model's own greedy answers, the end token included. That is the
    chance that a draft of one token is accepted at temperature 0.
    """
    shares = []
    with torch.inference_mode():
        for task, answer in zip(tqdm(tasks, desc="agreement", leave=False), answers, strict=True):
            ids = _prompt_ids(large, task, answer)
            start = len(_prompt_ids(large, task))
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
    shares = agreement(small, large, tasks, answers["large"])
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
