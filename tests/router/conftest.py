"""A small labelled world: sums whose length decides who gets them right."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from router.dataset import LabelledPrompts
from router.estimator import TrainedRouter, train_router


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
