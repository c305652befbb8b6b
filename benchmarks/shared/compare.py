"""Are two sets of answers equal, and where they are not, how close was the call?

Two ways to compute the same logits differ in their last bits. In float32 that hardly ever changes
an answer; in bfloat16 it does wherever two tokens are nearly tied. A divergence is therefore
reported with its logit gap: how far apart the reference model itself, fed the common beginning,
sees the two tokens. A gap of a rounding step or two is a tie; a larger one is a defect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams

NextLogits = Callable[[Sequence[int]], Tensor]
"""From the token ids of a text to the float32 logits of its next token, [vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place at which two answers to one prompt differ.

    `position` counts the answer's tokens from 0. A token is None where that answer has ended.
    `logit_gap`: reference token's logit minus the other's; None without a model or a token.
    """

    index: int
    position: int
    reference_token: int | None
    other_token: int | None
    logit_gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Counts of equal answers, and the divergences of the others."""

    num_answers: int
    divergences: tuple[Divergence, ...]

    @property
    def num_equal(self) -> int:
        """Answers that are equal token for token."""
        return self.num_answers - len(self.divergences)

    @property
    def is_equal(self) -> bool:
        """Return whether all answers are equal."""
        return not self.divergences

    @property
    def largest_gap(self) -> float | None:
        """The largest logit gap, in magnitude; None where nothing diverged or no gap is known."""
        gaps = [abs(d.logit_gap) for d in self.divergences if d.logit_gap is not None]
        return max(gaps, default=None)

    def record(self) -> dict[str, Any]:
        """For the results."""
        return {
            "num_answers": self.num_answers,
            "num_equal": self.num_equal,
            "largest_logit_gap": self.largest_gap,
            "divergences": self.divergences,
        }

    def __str__(self) -> str:
        """Such as `11 of 12 equal, gap 0.031`."""
        text = f"{self.num_equal} of {self.num_answers} equal"
        gap = self.largest_gap
        return text if gap is None else f"{text}, gap {gap:.3g}"


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first unequal token, the shorter's length if it is a prefix, None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_answers(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    *,
    next_logits: NextLogits | None = None,
) -> Comparison:
    """Compare answers prompt by prompt; `next_logits` of the model to measure the gaps with."""
    divergences = []
    for index, (prompt, left, right) in enumerate(zip(prompts, reference, other, strict=True)):
        position = first_difference(left, right)
        if position is None:
            continue
        left_token = left[position] if position < len(left) else None
        right_token = right[position] if position < len(right) else None
        gap = None
        if next_logits is not None and left_token is not None and right_token is not None:
            logits = next_logits([*prompt, *left[:position]])
            gap = float(logits[left_token] - logits[right_token])
        divergences.append(
            Divergence(
                index=index,
                position=position,
                reference_token=left_token,
                other_token=right_token,
                logit_gap=gap,
            )
        )
    return Comparison(num_answers=len(reference), divergences=tuple(divergences))


def combine(comparisons: Sequence[Comparison]) -> Comparison:
    """Many comparisons as one, indices going on from one to the next."""
    divergences: list[Divergence] = []
    num_answers = 0
    for comparison in comparisons:
        divergences += [
            replace(divergence, index=num_answers + divergence.index)
            for divergence in comparison.divergences
        ]
        num_answers += comparison.num_answers
    return Comparison(num_answers=num_answers, divergences=tuple(divergences))


def sampled_scores(next_logits: NextLogits, sampling: SamplingParams) -> NextLogits:
    """Return what a sampled token is the argmax of: logits / temperature + the large tier's noise.

    Only for plain temperature: top-k, top-p, min-p and penalties are not applied.
    """

    def scores(token_ids: Sequence[int]) -> Tensor:
        logits = next_logits(token_ids)
        noise = SequenceNoise(sampling, "large", vocab_size=len(logits))
        return logits / sampling.temperature + noise.rows(len(token_ids), 1, logits.device)[0]

    return next_logits if sampling.is_greedy else scores


def runner_logits(runner: ModelRunner) -> NextLogits:
    """Teacher forcing through our own model: one prefill of the text, nothing cached after it."""

    @torch.inference_mode()
    def next_logits(token_ids: Sequence[int]) -> Tensor:
        view = runner.new_view("compare")
        try:
            view.reserve(len(token_ids))
            piece = ForwardSlice(
                view=view, token_ids=list(token_ids), start_slot=0, num_logit_rows=1
            )
            return runner.forward([piece]).logits[0].float()
        finally:
            view.release()

    return next_logits
