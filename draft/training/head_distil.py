"""Distils a head: its divergence from the large model at each level of an unrolled draft.

Levels count less the deeper they are (0.8 each, as in EAGLE-3's own training). Targets are the
stored candidates that the head's vocabulary has; a place counts by their share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.draft.training.distill import (
    DistillPlan,
    collate,
    measured_once,
    shuffled_batches,
    split_rows,
)
from outrider.draft.training.head_model import TrainedHead, UnrollRows
from outrider.draft.training.loop import LossFunction, Trainer
from outrider.draft.training.own_answers import TappedRow
from outrider.kernels.cpu.product_library import InstructionSet, product_support

_LEVEL_DECAY = 0.8
_MEASURED_ROWS = 8
# Logits of a level that are kept for the backward pass; more are computed twice.
_MAX_KEPT_LOGITS = 16 << 20
# Channels from which on bfloat16 pays on a CPU.
_LEAST_BFLOAT16_SIZE = 512
# Peak rate of a head 256 wide.
_RATE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthAcceptance:
    """How deep a chain of first choices agrees with the large model's, on text held out.

    levels[d]: share of roots whose guess of level d is right, of those with right ones above it.
    paths[d]: share of roots with d + 1 right guesses in a row. Roots without so many tokens behind
    them in their text do not count at a level.
    """

    levels: tuple[float, ...]
    paths: tuple[float, ...]
    num_roots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """Results of a run; seconds and tokens over all its resumptions."""

    before: DepthAcceptance
    after: DepthAcceptance
    coverage: float
    """Share of the answers' tokens that the head's vocabulary has."""
    steps: int
    tokens: int
    seconds: float
    num_learnt: int
    num_held_out: int
    num_parameters: int


def collate_tapped(rows: Sequence[TappedRow]) -> tuple[Tensor, ...]:
    """`collate` of the rows, and their taps: float32 [rows, length, size], zeros behind the end."""
    batch = collate(rows)
    size = rows[0].tap_size
    taps = torch.zeros(*batch[0].shape, size)
    for index, row in enumerate(rows):
        taps[index, : len(row.token_ids)] = row.read_taps()
    return *batch, taps


def unrolled_rows(token_ids: Tensor, weights: Tensor, taps: Tensor) -> UnrollRows:
    """The rows whose first guess is a token of the answer: all from the first such on.

    Sequences with fewer of them than others repeat their last one.
    """
    length = token_ids.shape[1]
    is_answer = weights > 0
    first = is_answer.int().argmax(1)  # the answer's first place, at least 1
    last = (is_answer * torch.arange(length, device=weights.device)).amax(1)
    start = (first - 2).clamp(min=0)
    num_rows = int((last - 1 - start).amax().clamp(min=1))
    steps = torch.arange(num_rows, device=weights.device)
    rows = torch.minimum(start[:, None] + steps, (last - 2).clamp(min=0)[:, None])
    return UnrollRows(token_ids=token_ids, taps=taps, rows=rows)


def _level_targets(
    rows: UnrollRows, weights: Tensor, level: int, is_first: Tensor
) -> tuple[Tensor, Tensor]:
    """(places guessed at a level [batch, num_rows], which of them count)."""
    places = rows.rows + 2 + level
    length = weights.shape[1]
    inside = places.clamp(max=length - 1)
    return inside, is_first & (places < length) & (weights.gather(1, inside) > 0)


def _is_first(rows: Tensor) -> Tensor:
    """False where a row repeats the one before it."""
    changes = rows[:, 1:] != rows[:, :-1]
    return torch.cat([torch.ones_like(rows[:, :1], dtype=torch.bool), changes], dim=1)


def unrolled_loss(head: TrainedHead, depth: int, device: torch.device) -> LossFunction:
    """KL(large || head) over the candidates that the head has, levels weighted, in nats."""

    def level_loss(
        hidden: Tensor, candidates: Tensor, goal: Tensor, draft_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_draft = head.logits(hidden).float().log_softmax(-1)
        ids = draft_ids[candidates]
        is_known = ids >= 0
        guess = log_draft.gather(1, ids.clamp(min=0))
        prob = goal.exp()
        known = prob * is_known
        # What the head has no token for is taken out of the distribution.
        share = (1.0 - (prob - known).sum(-1)).clamp(min=0.0)
        rest = (1.0 - prob.sum(-1)).clamp(min=1e-6)
        draft_rest = (1.0 - (guess.exp() * is_known).sum(-1)).clamp(min=1e-6)
        divergence = (known * (goal - guess)).sum(-1) + rest * (rest.log() - draft_rest.log())
        divergence = divergence - share * share.clamp(min=1e-6).log()
        return divergence.sum(), share.sum()

    def loss(
        token_ids: Tensor, weights: Tensor, top_ids: Tensor, top_logprobs: Tensor, taps: Tensor
    ) -> Tensor:
        rows = unrolled_rows(token_ids, weights, taps)
        is_first = _is_first(rows.rows)
        batch = torch.arange(len(token_ids), device=device)[:, None].expand_as(rows.rows)
        total = torch.zeros((), device=device)
        draft_ids = head.draft_ids
        with torch.autocast(device.type, torch.bfloat16, enabled=_bfloat16_pays(head, device)):
            for level, hidden in enumerate(head.unroll(rows, depth)):
                places, counts = _level_targets(rows, weights, level, is_first)
                where = (batch[counts], places[counts])
                inputs = (hidden[counts], top_ids[where], top_logprobs[where], draft_ids)
                size = len(inputs[0]) * head.sizes.draft_vocab_size
                if size > _MAX_KEPT_LOGITS:
                    divergence, share = checkpoint(level_loss, *inputs, use_reentrant=False)
                else:
                    divergence, share = level_loss(*inputs)
                total = total + _LEVEL_DECAY**level * divergence / share.clamp(min=1.0)
        return total / sum(_LEVEL_DECAY**level for level in range(depth))

    return loss


def _bfloat16_pays(head: TrainedHead, device: torch.device) -> bool:
    """True if narrower products save more time than conversions take.

    On a CPU whose products of bfloat16 are faster (AVX-512) and with rows as long as these, a step
    takes 0.55 of float32's time at 576 channels.
    """
    if device.type != "cpu":
        return True
    is_fast = product_support().instruction_set is InstructionSet.AVX512
    return is_fast and head.sizes.hidden_size >= _LEAST_BFLOAT16_SIZE


@torch.inference_mode()
def measure_acceptance(
    head: TrainedHead, rows: Sequence[TappedRow], depth: int, device: torch.device
) -> DepthAcceptance:
    """Acceptance by depth of chains from every place of the rows' answers, teacher-forced.

    A chain is right as long as its first choices are the large model's: its next tokens are then
    the text's, where that is greedy.
    """
    head.train(False)
    token_ids = head.token_ids
    right = torch.zeros(depth, dtype=torch.int64)
    asked = torch.zeros(depth, dtype=torch.int64)
    reached = torch.zeros(depth, dtype=torch.int64)
    for start in range(0, len(rows), _MEASURED_ROWS):
        tensors = collate_tapped(rows[start : start + _MEASURED_ROWS])
        ids, weights, top_ids, _, taps = (tensor.to(device) for tensor in tensors)
        unrolled = unrolled_rows(ids, weights, taps)
        is_first = _is_first(unrolled.rows)
        alive = is_first
        for level, hidden in enumerate(head.unroll(unrolled, depth)):
            places, counts = _level_targets(unrolled, weights, level, is_first)
            best = token_ids[head.logits(hidden).argmax(-1)]
            hits = best == top_ids[..., 0].gather(1, places)
            reached[level] += int((alive & counts).sum())
            asked[level] += int(counts.sum())
            alive = alive & counts & hits
            right[level] += int(alive.sum())
    return depth_acceptance(right, reached, asked)


def depth_acceptance(right: Tensor, reached: Tensor, asked: Tensor) -> DepthAcceptance:
    """Shares from counts by level: right paths, guesses below right paths, roots."""
    return DepthAcceptance(
        levels=tuple((right / reached.clamp(min=1)).tolist()),
        paths=tuple((right / asked.clamp(min=1)).tolist()),
        num_roots=int(asked[0]),
    )


def frequent_tokens(rows: Sequence[TappedRow], vocab_size: int, number: int) -> Tensor:
    """The `number` tokens that the large model expects most often in answers, ascending."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for row in rows:
        start = max(1, row.num_prompt_tokens)
        ids = row.top_ids[start:].flatten().long()
        mass.scatter_add_(0, ids, row.top_logprobs[start:].flatten().double().exp())
    return mass.argsort(descending=True, stable=True)[:number].sort().values


def distil_head(
    head: TrainedHead,
    rows: Sequence[TappedRow],
    plan: DistillPlan,
    run_dir: Path,
    *,
    depth: int,
    device: torch.device,
) -> HeadReport:
    """Train `head` in place, on from the checkpoint in `run_dir` if there is one.

    `depth`: levels to unroll. Raises DistillError for too few rows.
    """
    learnt, held_out = split_rows(rows, plan)
    trainer = Trainer(
        head, plan.training_plan(plan.learning_rate or default_rate(head)), run_dir, device
    )
    before = measured_once(
        run_dir / "before.json",
        DepthAcceptance,
        lambda: measure_acceptance(head, held_out, depth, device),
    )
    trainer.resume()
    draw = shuffled_batches(learnt, plan.batch_size, plan.seed, collate_tapped)
    trainer.run(unrolled_loss(head, depth, device), draw, lambda: None)
    return HeadReport(
        before=before,
        after=measure_acceptance(head, held_out, depth, device),
        coverage=_coverage(head, held_out),
        steps=trainer.progress.step,
        tokens=trainer.progress.tokens,
        seconds=trainer.progress.seconds,
        num_learnt=len(learnt),
        num_held_out=len(held_out),
        num_parameters=sum(parameter.numel() for parameter in head.parameters()),
    )


def default_rate(head: TrainedHead) -> float:
    """Lower for wider heads."""
    return _RATE * min(1.0, math.sqrt(256 / head.sizes.hidden_size))


def _coverage(head: TrainedHead, rows: Sequence[TappedRow]) -> float:
    draft_ids = head.draft_ids
    answers = torch.cat([row.token_ids[max(1, row.num_prompt_tokens) :] for row in rows])
    return int((draft_ids[answers] >= 0).sum()) / max(1, len(answers))
