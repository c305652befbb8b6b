"""Estimates of every stage of a router for labelled prompts: for evaluation and calibration."""

from typing import Any

import numpy as np

from outrider.router.calibration import StageRows
from outrider.router.dataset import LabelledPrompts
from outrider.router.estimates import QualityEstimate
from outrider.router.features import FloatRows
from outrider.router.ladder import LadderRows
from outrider.router.scorer import RouterScorer
from outrider.router.worth_fit import with_costs


def stage_rows(
    scorer: RouterScorer, data: LabelledPrompts, *, hold_back_tokens: int | None = 16
) -> StageRows:
    """The router's qualities of the data's prompts, stage by stage as far as both know them.

    The answer stage sees the first `hold_back_tokens` log-probabilities, as a watch
    does, or whole answers with None. Rows that the router was trained on flatter it. Without labels
    the large model is never wrong. Raises ValueError for `hold_back_tokens` below 1.
    """
    text = [scorer.estimate(prompt) for prompt in data.prompts]
    unknown: list[Any] = [None] * len(text)
    hidden = unknown if data.hidden is None else list(data.hidden)
    shares: list[FloatRows | None] = unknown
    if scorer.encoder is not None and data.embeddings is not None:
        shares = list(scorer.encoder.neighbours.shares(data.embeddings.rows))
    prompt = [scorer.estimate_prompt(*known) for known in zip(text, hidden, shares, strict=True)]
    answer = None
    if scorer.answer is not None and data.logprobs is not None:
        seen = [seen_logprobs(logprobs, hold_back_tokens) for logprobs in data.logprobs]
        answer = [
            scorer.estimate_answer(estimate, logprobs, is_whole=is_whole)
            for estimate, (logprobs, is_whole) in zip(prompt, seen, strict=True)
        ]
    rows = labelled_rows(
        data,
        text=_qualities(text),
        prompt=_qualities(prompt),
        answer=None if answer is None else _qualities(answer),
        hold_back_tokens=hold_back_tokens,
        text_right=_small_right(text),
        last_right=_small_right(answer or prompt),
    )
    if scorer.tiers is not None and data.tiers is not None:
        chances = np.array([estimate.heads for estimate in text]).T
        return tier_rows(data.tiers.rows(chances, scorer.tiers))
    if scorer.worth is None:
        return rows
    return with_costs(rows, scorer.worth, [one.tokens for one in text if one.tokens is not None])


def tier_rows(tiers: LadderRows) -> StageRows:
    """The prompts of more than two tiers, which the text judges."""
    quality = tiers.qualities()
    return StageRows(
        text=quality,
        prompt=quality,
        answer=None,
        weak=tiers.scores[0],
        strong=tiers.scores[-1],
        text_right=tiers.chances[0],
        last_right=tiers.chances[0],
        tiers=tiers,
    )


def labelled_rows(
    data: LabelledPrompts,
    *,
    text: FloatRows,
    prompt: FloatRows,
    answer: FloatRows | None,
    hold_back_tokens: int | None,
    text_right: FloatRows | None = None,
    last_right: FloatRows | None = None,
) -> StageRows:
    """The qualities beside what the data know of each prompt: all [num_prompts]."""
    if hold_back_tokens is None:
        hold_back_tokens = max((len(seen) for seen in data.logprobs or ()), default=1)
    return StageRows(
        text=text,
        prompt=prompt,
        answer=answer,
        weak=data.weak,
        strong=np.ones_like(data.weak) if data.strong is None else data.strong,
        text_right=text_right,
        last_right=last_right,
        hold_back_tokens=hold_back_tokens,
        num_prompt_tokens=data.num_prompt_tokens,
        num_weak_tokens=data.num_weak_tokens,
        num_strong_tokens=data.num_strong_tokens,
        weak_s=data.weak_s,
        strong_s=data.strong_s,
    )


def seen_logprobs(logprobs: FloatRows, hold_back_tokens: int | None) -> tuple[FloatRows, bool]:
    """Return the input of a watch when it must decide, and whether the answer is surely whole.

    At the last token that may be held it is unknown whether another one follows.
    """
    if hold_back_tokens is None or len(logprobs) < hold_back_tokens:
        return logprobs, True
    if hold_back_tokens < 1:
        raise ValueError(f"hold_back_tokens={hold_back_tokens} must be at least 1")
    return logprobs[:hold_back_tokens], False


def _qualities(estimates: list[QualityEstimate]) -> FloatRows:
    """1 - gain, [num_prompts]: not clipped at 1, so that the order beyond it is kept."""
    return np.array([1.0 - estimate.gain for estimate in estimates])


def _small_right(estimates: list[QualityEstimate]) -> FloatRows:
    return np.array([estimate.small for estimate in estimates])
