"""Drafters trained on the same answers of a large model: a head that reads it, small models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.driving import load_runner
from outrider.draft.training.distill import (
    DistillPlan,
    collate,
    copy_tokenizer,
    distil,
    fresh_drafter,
)
from outrider.draft.training.head_distil import (
    DepthAcceptance,
    depth_acceptance,
    distil_head,
)
from outrider.draft.training.head_files import default_taps, write_head
from outrider.draft.training.head_job import fresh_head, tapped_runner
from outrider.draft.training.head_model import TrainedHead
from outrider.draft.training.loop import publish_folder
from outrider.draft.training.own_answers import (
    AnswerPlan,
    TappedRow,
    TaughtRow,
    render_prompts,
    teach,
    write_answers,
)
from outrider.draft.training.prompt_file import PromptRow
from outrider.draft.training.tasks.families import Split, stream
from outrider.engine.core import Engine
from outrider.engine.model.quantised.formats import SchemeName

CPU = torch.device("cpu")
_NUM_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallShape:
    """Layers and width of a small drafter."""

    layers: int
    width: int

    def __str__(self) -> str:
        """As in tables."""
        return f"small, {self.layers} x {self.width}"


def task_rows(split: Split, number: int, seed: int) -> list[PromptRow]:
    """Prompts of the pair's world without tools, each with its turns."""
    tasks = (task for task in stream(seed, split) if not task.tools)
    return [
        PromptRow(
            messages=tuple((message["role"], message["content"]) for message in task.messages)
        )
        for task in islice(tasks, number)
    ]


def answered(
    large: Path,
    prompts: Sequence[PromptRow],
    plan: AnswerPlan,
    folder: Path,
    *,
    tokenizer: Any,
    scheme: SchemeName | None = None,
) -> list[TappedRow]:
    """The large model's answers with targets and taps; kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    runner = load_runner(large, dtype="auto", device="cpu", num_blocks=_NUM_BLOCKS, scheme=scheme)
    engine = Engine(runners={"large": runner})
    rows = write_answers(engine, render_prompts(prompts, tokenizer), plan, folder / "answers.jsonl")
    taps = default_taps("eagle3", runner.model.config.num_layers)
    taught = teach(tapped_runner(runner, taps), rows, plan.top_k, folder / "targets")
    return [row for row in taught if isinstance(row, TappedRow)]


def trained_head(
    large: Path,
    rows: Sequence[TappedRow],
    plan: DistillPlan,
    folder: Path,
    *,
    draft_vocab_size: int,
    depth: int,
) -> tuple[TrainedHead, int]:
    """A head trained on the rows and written to `folder`, and the steps that it took."""
    head = fresh_head("eagle3", large, rows, draft_vocab_size, seed=plan.seed)
    report = distil_head(head, rows, plan, folder / "training", depth=depth, device=CPU)
    write_head(head, large, folder, torch.bfloat16)
    return head, report.steps


def trained_small(
    large: Path, rows: Sequence[TaughtRow], plan: DistillPlan, folder: Path, shape: SmallShape
) -> Any:
    """A small model trained on the rows."""
    model = fresh_drafter(large, num_layers=shape.layers, hidden_size=shape.width, seed=plan.seed)
    distil(model, rows, plan, folder / "training", device=CPU)
    publish_folder(model, partial(copy_tokenizer, large), folder)
    return model


# ---- how deep chains of first choices are right -----------------------------------------------


@torch.inference_mode()
def small_acceptance(model: Any, rows: Sequence[TaughtRow], depth: int) -> DepthAcceptance:
    """As `measure_acceptance` of a head, from the same places."""
    model.train(False)
    right, reached, asked = (torch.zeros(depth, dtype=torch.int64) for _ in range(3))
    for row in rows:
        token_ids, weights, top_ids, _ = collate([row])
        logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1]
        hits = (logits.argmax(-1) == top_ids[0, 1:, 0])[weights[0, 1:] > 0]
        # The first token of a text has nothing in front of it that a head could read.
        hits = hits[max(0, 2 - max(1, row.num_prompt_tokens)) :]
        _count(hits, depth, right, reached, asked)
    return depth_acceptance(right, reached, asked)


def _count(hits: Tensor, depth: int, right: Tensor, reached: Tensor, asked: Tensor) -> None:
    alive = torch.ones_like(hits)
    for level in range(min(depth, len(hits))):
        inside = len(hits) - level
        alive = alive[:inside]
        asked[level] += inside
        reached[level] += int(alive.sum())
        alive = alive & hits[level:]
        right[level] += int(alive.sum())
