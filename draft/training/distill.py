"""Distils a small drafter from a large model's stored next-token distributions.

The loss is the forward KL divergence over the large model's `top_k` candidates, everything else
counted as one further outcome (cf. DistillSpec, Zhou et al. 2024, on why the drafter's own use,
answers of the large model, is the text to learn from). Acceptance at temperature 0 is how often
the two first choices agree, so that is measured on rows held out, before and after.
"""

import json
import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from outrider.draft.training.loop import (
    Draw,
    LossFunction,
    ModelShape,
    Progress,
    Trainer,
    TrainingPlan,
    build_llama,
)
from outrider.draft.training.own_answers import TaughtRow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Row = TypeVar("Row", bound=TaughtRow)
Found = TypeVar("Found", bound="DataclassInstance")

_MEASURED_ROWS = 8
# Rows of similar length share a batch; each draw fills this many batches.
_BATCHES_PER_DRAW = 16
_WARMUP_STEPS = 50
# Peak learning rates of a model 128 wide.
_FRESH_RATE = 4e-3
_TRAINED_RATE = 1.5e-3
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class DistillError(ValueError):
    """A drafter cannot be trained from what was given; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillPlan:
    """Length and settings of a drafter's training.

    With `minutes` alone or first reached, the weights depend on the machine's speed; with `steps`
    on the seed only.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 16
    """Sequences."""
    learning_rate: float | None = None
    """The peak; None is `default_learning_rate`."""
    seed: int = 0
    held_out: float = 0.05
    """The share of the sequences that are not learnt from."""
    checkpoint_minutes: float = 1.0

    def training_plan(self, learning_rate: float) -> TrainingPlan:
        """Return the same plan for the trainer."""
        warmup = _WARMUP_STEPS if self.steps is None else min(_WARMUP_STEPS, 1 + self.steps // 10)
        return TrainingPlan(
            steps=self.steps,
            minutes=self.minutes,
            peak_lr=learning_rate,
            warmup_steps=warmup,
            publish_minutes=self.checkpoint_minutes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Share of places where the drafter's first choice, or its top three, has the large model's."""

    first: float
    top3: float
    num_tokens: int


# ---- the drafter ----------------------------------------------------------------------------


def default_shape(large: Any, *, num_layers: int | None, hidden_size: int | None) -> ModelShape:
    """Sizes of a drafter for a large model's configuration; what is None follows from it.

    A quarter of the layers, at most four, and of the width: about a thirtieth of the weights.
    Raises DistillError for a width that heads cannot share.
    """
    layers = num_layers or min(4, max(1, large.num_hidden_layers // 4))
    quarter = round(large.hidden_size / 4 / 64) * 64
    width = hidden_size or min(large.hidden_size, max(128, quarter))
    head_dim = next((size for size in (64, 32, 16, 8) if width % (2 * size) == 0), None)
    if head_dim is None:
        raise DistillError(f"--width {width} must be a multiple of 16, best of 128")
    if width <= 128:
        head_dim = min(head_dim, 32)
    num_heads = width // head_dim
    return ModelShape(
        hidden_size=width,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=head_dim,
        mlp_size=round(3.5 * width / 32) * 32,
    )


def fresh_drafter(
    large: Path, *, num_layers: int | None, hidden_size: int | None, seed: int
) -> LlamaForCausalLM:
    """An untrained Llama with the large model's vocabulary, context and special tokens."""
    config: Any = AutoConfig.from_pretrained(large, trust_remote_code=False)
    return build_llama(
        default_shape(config, num_layers=num_layers, hidden_size=hidden_size),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        seed=seed,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=getattr(config, "pad_token_id", None),
    )


def copy_tokenizer(large: Path, folder: Path) -> None:
    """The large model's tokenizer, chat template and generation settings, file by file."""
    for name in _TOKENIZER_FILES:
        if (large / name).is_file():
            (folder / name).write_bytes((large / name).read_bytes())


def default_learning_rate(model: PreTrainedModel, *, is_fresh: bool) -> float:
    """Lower for wider models, and for those that know something already."""
    width: int = model.config.hidden_size
    peak = _FRESH_RATE if is_fresh else _TRAINED_RATE
    return peak * min(1.0, math.sqrt(128 / width))


# ---- data -----------------------------------------------------------------------------------


def split_rows(rows: Sequence[Row], plan: DistillPlan) -> tuple[list[Row], list[Row]]:
    """(learnt, held out), a function of the seed; at least one of each.

    Raises DistillError for fewer than two rows.
    """
    if len(rows) < 2:
        raise DistillError(
            f"{len(rows)} usable sequence(s) are too few: one is held out to measure with, so at "
            "least two are needed, and a useful drafter needs thousands. Give more prompts."
        )
    order = list(range(len(rows)))
    random.Random(f"held out/{plan.seed}").shuffle(order)
    num_held_out = min(len(rows) - 1, max(1, round(plan.held_out * len(rows))))
    held_out = set(order[:num_held_out])
    learnt = [row for index, row in enumerate(rows) if index not in held_out]
    return learnt, [rows[index] for index in sorted(held_out)]


def collate(rows: Sequence[TaughtRow]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token ids, weights, top ids, top log-probabilities) of rows, padded at the end.

    [rows, length] int64, [rows, length] float32, [rows, length, top_k] int64 and float32. Weights
    are 1 where a token of the answer is predicted: drafts are never asked for prompts.
    """
    length = max(len(row.token_ids) for row in rows)
    top_k = rows[0].top_ids.shape[1]
    token_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    top_ids = torch.zeros(len(rows), length, top_k, dtype=torch.int64)
    top_logprobs = torch.zeros(len(rows), length, top_k)
    for index, row in enumerate(rows):
        end = len(row.token_ids)
        token_ids[index, :end] = row.token_ids
        weights[index, max(1, row.num_prompt_tokens) : end] = 1.0
        top_ids[index, :end] = row.top_ids
        top_logprobs[index, :end] = row.top_logprobs
    return token_ids, weights, top_ids, top_logprobs


def shuffled_batches(
    rows: Sequence[Row],
    batch_size: int,
    seed: int,
    collated: Callable[[Sequence[Row]], tuple[Tensor, ...]] = collate,
) -> Draw:
    """Every row once an epoch, in batches of similar length.

    A function of the seed and the step alone, so a resumed run sees the same batches.
    """
    num_batches = -(-len(rows) // batch_size)

    def draw(_: TrainingPlan, progress: Progress) -> tuple[Tensor, ...]:
        epoch, number = divmod(progress.step, num_batches)
        return collated([rows[index] for index in _epoch(epoch)[number]])

    cached: dict[int, list[list[int]]] = {}

    def _epoch(epoch: int) -> list[list[int]]:
        if epoch not in cached:
            cached.clear()
            rng = random.Random(f"epoch/{seed}/{epoch}")
            order = list(range(len(rows)))
            rng.shuffle(order)
            drawn = batch_size * _BATCHES_PER_DRAW
            for first in range(0, len(order), drawn):
                order[first : first + drawn] = sorted(
                    order[first : first + drawn], key=lambda index: len(rows[index].token_ids)
                )
            batches = [
                order[first : first + batch_size] for first in range(0, len(order), batch_size)
            ]
            rng.shuffle(batches)
            cached[epoch] = batches
        return cached[epoch]

    return draw


# ---- loss and measure -----------------------------------------------------------------------


def soft_target_loss(model: PreTrainedModel, device: torch.device) -> LossFunction:
    """KL(large || drafter) over the stored candidates and one outcome for all others, in nats."""

    def loss(token_ids: Tensor, weights: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits, places = _wanted_logits(model, token_ids, weights)  # [num_wanted, vocab_size]
        log_draft = logits.float().log_softmax(-1)
        goal = top_logprobs[places]  # [num_wanted, top_k]
        candidates = top_ids[places]
        # A large vocabulary may be padded further than that of a drafter one starts from.
        is_known = candidates < logits.shape[1]
        guess = log_draft.gather(1, candidates.clamp(max=logits.shape[1] - 1))
        prob = goal.exp() * is_known
        rest = (1.0 - prob.sum(-1)).clamp(min=1e-6)
        draft_rest = (1.0 - (guess.exp() * is_known).sum(-1)).clamp(min=1e-6)
        divergence = (prob * (goal - guess)).sum(-1) + rest * (rest.log() - draft_rest.log())
        return divergence.mean()

    return loss


def _wanted_logits(
    model: PreTrainedModel, token_ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits at the places that count, and where these are: the head is most of a small model."""
    body: Any = model
    hidden = body.model(input_ids=token_ids, use_cache=False).last_hidden_state
    places = weights > 0  # [rows, length]
    # Place t is predicted by what stands before it.
    before = places.roll(-1, dims=1)
    return body.lm_head(hidden[before]), places


@torch.inference_mode()
def measure_agreement(
    model: PreTrainedModel, rows: Sequence[TaughtRow], device: torch.device
) -> Agreement:
    """Agreement of first choices on the rows' answers, teacher-forced."""
    torch.nn.Module.eval(model)
    first, top3, total = 0, 0, 0
    for start in range(0, len(rows), _MEASURED_ROWS):
        batch = [tensor.to(device) for tensor in collate(rows[start : start + _MEASURED_ROWS])]
        token_ids, weights, top_ids, _ = batch
        logits, places = _wanted_logits(model, token_ids, weights)
        best = logits.topk(3).indices  # [num_wanted, 3]
        hits = best == top_ids[places][:, :1]
        first += int(hits[:, 0].sum())
        top3 += int(hits.any(-1).sum())
        total += len(hits)
    return Agreement(first=first / max(total, 1), top3=top3 / max(total, 1), num_tokens=total)


# ---- the run --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillReport:
    """Results of a run; seconds and tokens over all its resumptions."""

    before: Agreement
    after: Agreement
    steps: int
    tokens: int
    seconds: float
    num_learnt: int
    num_held_out: int
    num_parameters: int


def distil(
    model: PreTrainedModel,
    rows: Sequence[TaughtRow],
    plan: DistillPlan,
    run_dir: Path,
    *,
    device: torch.device,
    is_fresh: bool = True,
) -> DistillReport:
    """Train `model` in place, on from the checkpoint in `run_dir` if there is one.

    `is_fresh`: whether the weights are random.

    Raises DistillError for too few rows.
    """
    learnt, held_out = split_rows(rows, plan)
    rate = plan.learning_rate or default_learning_rate(model, is_fresh=is_fresh)
    trainer = Trainer(model, plan.training_plan(rate), run_dir, device)
    # Measured before the checkpoint replaces the initial weights, and kept for the resumptions.
    before = measured_once(
        run_dir / "before.json", Agreement, lambda: measure_agreement(model, held_out, device)
    )
    trainer.resume()
    trainer.run(
        soft_target_loss(model, device),
        shuffled_batches(learnt, plan.batch_size, plan.seed),
        lambda: None,
    )
    return DistillReport(
        before=before,
        after=measure_agreement(model, held_out, device),
        steps=trainer.progress.step,
        tokens=trainer.progress.tokens,
        seconds=trainer.progress.seconds,
        num_learnt=len(learnt),
        num_held_out=len(held_out),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def measured_once(path: Path, kind: type[Found], measure: Callable[[], Found]) -> Found:
    """Return what `measure` found when this was first called for `path`, which keeps it."""
    if path.exists():
        return kind(**json.loads(path.read_text()))
    found = measure()
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(found)) + "\n")
    os.replace(partial, path)
    return found
