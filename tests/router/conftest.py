"""A small labelled world: sums whose length decides which tier gets them right."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from outrider.router.dataset import LabelledPrompts
from outrider.router.estimator import TrainConfig, TrainedRouter, train_router
from outrider.router.features import FeatureConfig

QUICK = TrainConfig(
    features=FeatureConfig(num_char_features=1024, num_word_features=1024),
    inverse_penalties=(1.0,),
    stage_penalties=(0.1,),
)


def labelled_sums(num_rows: int, seed: int) -> LabelledPrompts:
    rng = random.Random(seed)
    prompts, weak, strong = [], [], []
    while len(prompts) < num_rows:
        digits = rng.randint(1, 6)
        left, right = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        prompt = rng.choice(("What is {} + {}?", "Add {} and {}.", "Hi! {}+{}=?"))
        prompts.append(prompt.format(left, right))
        weak.append(float(rng.random() < (0.95 if digits <= 3 else 0.1)))
        strong.append(float(rng.random() < (0.98 if digits <= 5 else 0.3)))
    return LabelledPrompts(
        prompts=prompts, weak=np.array(weak), strong=np.array(strong), sha256="0" * 64
    )


def labelled_answers(num_rows: int, seed: int) -> LabelledPrompts:
    """Sums of which text shows the length, the hidden state a trap, and the answer a doubt."""
    rng = np.random.default_rng(seed)
    digits = rng.integers(1, 7, num_rows)
    left, right = (rng.integers(10 ** (digits - 1), 10**digits) for _ in range(2))
    has_trap, has_doubt = rng.random((2, num_rows)) < 0.25
    is_right = (digits <= 4) & ~has_trap & ~has_doubt
    weak = (rng.random(num_rows) < np.where(is_right, 0.97, 0.05)).astype(np.float64)
    strong = (rng.random(num_rows) < 0.95).astype(np.float64)
    hidden = rng.normal(scale=2.0, size=(num_rows, 6)) + 5.0
    hidden[:, 2] += 8.0 * has_trap
    logprobs = []
    for is_doubtful in has_doubt:
        answer = -rng.exponential(0.02, int(rng.integers(1, 40)))
        if is_doubtful:
            answer[: len(answer) // 2 + 1] -= rng.exponential(2.0, len(answer) // 2 + 1)
        logprobs.append(answer)
    num_tokens = np.array([float(len(answer)) for answer in logprobs])
    return LabelledPrompts(
        prompts=[f"What is {x} + {y}?" for x, y in zip(left, right, strict=True)],
        weak=weak,
        strong=strong,
        sha256="1" * 64,
        hidden=hidden,
        logprobs=logprobs,
        num_prompt_tokens=np.full(num_rows, 8.0),
        num_weak_tokens=num_tokens,
        num_strong_tokens=num_tokens + 1.0,
        weak_s=0.01 * num_tokens,
        strong_s=0.05 * num_tokens,
        pair="0123456789abcdef-fedcba9876543210",
    )


def write_jsonl(path: Path, data: LabelledPrompts) -> Path:
    assert data.strong is not None
    rows = zip(data.prompts, data.weak.tolist(), data.strong.tolist(), strict=True)
    lines = [
        json.dumps({"prompt": prompt, "weak_correct": int(weak), "strong_correct": int(strong)})
        for prompt, weak, strong in rows
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def training_data() -> LabelledPrompts:
    return labelled_sums(400, seed=1)


@pytest.fixture(scope="session")
def held_out_data() -> LabelledPrompts:
    return labelled_sums(400, seed=2)


@pytest.fixture(scope="session")
def trained(training_data: LabelledPrompts) -> TrainedRouter:
    return train_router(training_data)


@pytest.fixture(scope="session")
def answered_data() -> LabelledPrompts:
    return labelled_answers(400, seed=1)


@pytest.fixture(scope="session")
def trained_stages(answered_data: LabelledPrompts) -> TrainedRouter:
    return train_router(answered_data, QUICK)


@pytest.fixture(scope="session")
def training_file(tmp_path_factory: pytest.TempPathFactory, training_data: LabelledPrompts) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", training_data)


@pytest.fixture(scope="session")
def held_out_file(tmp_path_factory: pytest.TempPathFactory, held_out_data: LabelledPrompts) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "held_out.jsonl", held_out_data)


@pytest.fixture(scope="session")
def router_folder(tmp_path_factory: pytest.TempPathFactory, trained: TrainedRouter) -> Path:
    folder = tmp_path_factory.mktemp("router") / "deep" / "router"
    trained.scorer.save(folder)
    return folder
