"""A drafter that disagrees with its target as often as real ones do, made from the demo pair.

The shipped small model writes nearly what the large one writes, which flatters speculation. Here
its matrices get Gaussian noise, from a seed and in proportion to each matrix's own spread, as much
as makes its first choice right at a wanted share of the places of the large model's own greedy
answers to held-out tasks. The large model stays as it is, and with it every answer. What was
measured is kept beside the weights (`agreement.json`) and in the results of whoever uses them.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.shared.harness import CACHE, console
from outrider.draft.training.pair_evaluation import Model, answer_all
from outrider.draft.training.tasks.base import Task
from outrider.draft.training.tasks.families import stream

FIRST_CHOICE = 0.69
"""The share wanted: of a 409 M target and its drafter on questions that neither had seen."""

_FOLDER = CACHE / "disagreeing"
_RECORD = "agreement.json"
_NUM_TASKS = 96
_NUM_HALVINGS = 10
_BEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often the large model's token is a drafter's first choice, or among its best four.

    Shares of `num_tokens` places, teacher-forced on the large model's greedy answers. The noise's
    level is in units of each matrix's standard deviation.
    """

    first: float
    best_four: float
    num_tokens: int
    noise_level: float


def add_pair_option(parser: argparse.ArgumentParser) -> None:
    """Add `--pair`, which `grown.grown_small` follows."""
    parser.add_argument(
        "--pair",
        choices=("demo", "disagreeing"),
        default="demo",
        help=f"disagreeing: noise on the small model, first choice right in {FIRST_CHOICE:.2f}",
    )


def disagreeing(large: Path, small: Path, *, seed: int = 0) -> Path:
    """The folder of `small` with noise, made once for these weights and this seed."""
    folder = _FOLDER / f"{small.name}-{_fingerprint(large, small, seed)}"
    if folder.is_dir():
        return folder
    _FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=_FOLDER, prefix="unfinished-"))
    try:
        shutil.copytree(small, unfinished, dirs_exist_ok=True)
        with console.status("looking for the noise that makes the pair disagree"):
            found = _find_level(_Noisy.of(large, small, seed), unfinished)
        (unfinished / _RECORD).write_text(json.dumps(asdict(found)), encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def measured_agreement(folder: Path) -> dict[str, Any] | None:
    """What was measured when the folder was made; None for another model."""
    record = folder / _RECORD
    found: dict[str, Any] | None = None
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, kw_only=True)
class _Noisy:
    """The small model and what it is judged by: the large model's answers as whole chats."""

    small: Model
    weights: dict[str, Tensor]
    seed: int
    texts: Sequence[tuple[int, list[int]]]

    @classmethod
    def of(cls, large: Path, small: Path, seed: int) -> "_Noisy":
        model = Model.load(small, torch.device("cpu"))
        weights = load_file(small / "model.safetensors")
        return cls(small=model, weights=weights, seed=seed, texts=answered_texts(large, seed))

    def agreement(self, level: float) -> Agreement:
        """At this level of noise."""
        self.small.network.load_state_dict(
            noisy_weights(self.weights, level, self.seed), strict=False
        )
        first, best, total = agreement_counts(self.small, self.texts)
        return Agreement(
            first=first / total, best_four=best / total, num_tokens=total, noise_level=level
        )


def _find_level(noisy: _Noisy, folder: Path) -> Agreement:
    """Halve the range of levels until the first choice is right as often as wanted; write it."""
    low, high = 0.0, 2.0
    found = noisy.agreement(high)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        at_middle = noisy.agreement(middle)
        if at_middle.first > FIRST_CHOICE:
            low = middle
        else:
            high, found = middle, at_middle
    weights = noisy_weights(noisy.weights, found.noise_level, noisy.seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def noisy_weights(weights: Mapping[str, Tensor], level: float, seed: int) -> dict[str, Tensor]:
    """Matrices with noise; norms as they are. The same noise, scaled, at every level."""
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in sorted(weights.items()):
        noise = torch.randn(weight.shape, generator=generator)
        scale = level * float(weight.float().std()) if weight.ndim > 1 else 0.0
        noisy[name] = (weight.float() + scale * noise).to(weight.dtype)
    return noisy


def answered_texts(large: Path, seed: int) -> list[tuple[int, list[int]]]:
    """Held-out tasks with the large model's greedy answers: each prompt's length and all ids."""
    model = Model.load(large, torch.device("cpu"))
    tasks = list(islice(stream(seed, "heldout"), _NUM_TASKS))
    answers = answer_all(model, tasks, max_answer_tokens=128)
    return [_as_ids(model, task, answer) for task, answer in zip(tasks, answers, strict=True)]


def _as_ids(model: Model, task: Task, answer: str) -> tuple[int, list[int]]:
    tokenizer: Any = model.tokenizer
    asked: list[Any] = list(task.messages)
    answered = [*asked, {"role": "assistant", "content": answer}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    return len(prompt), tokenizer.apply_chat_template(answered, return_dict=False)


@torch.inference_mode()
def agreement_counts(model: Model, texts: Sequence[tuple[int, list[int]]]) -> tuple[int, int, int]:
    """Places where the answer's token is the first choice, where among the best four, and all."""
    first = best = total = 0
    for start, ids in texts:
        logits = model.network(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
        hits = logits.topk(_BEST).indices == torch.tensor(ids[start:])[:, None]
        first += int(hits[:, 0].sum())
        best += int(hits.any(-1).sum())
        total += len(hits)
    return first, best, total


def _fingerprint(large: Path, small: Path, seed: int) -> str:
    digest = hashlib.sha256(f"{seed} {FIRST_CHOICE} {_NUM_TASKS}".encode())
    for file in [*sorted(large.glob("*.safetensors")), *sorted(small.glob("*.safetensors"))]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:8]
