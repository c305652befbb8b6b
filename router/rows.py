"""Labelled prompts as the stages of a router judge them, and who answers them under a setting."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FloatRows
from outrider.router.ladder import LadderRows

Stage = Literal["text", "prompt", "answer"]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRows:
    """Labelled prompts as each stage judges them; every array is [num_prompts].

    Qualities are 1 - gain, in [0, 2]. The policy clips them at 1; the order beyond it still counts
    for APGR. Tokens and seconds are None where the data lack them.
    """

    text: FloatRows
    prompt: FloatRows
    """Equals `text` where there is no probe."""
    answer: FloatRows | None
    """None where nothing is known of the small model's answers. It has seen their first
    `hold_back_tokens`."""
    weak: FloatRows
    """The small tier's score, in [0, 1]."""
    strong: FloatRows
    """The large tier's score, in [0, 1]."""
    text_right: FloatRows | None = None
    """The text's estimate of the small tier's score; None: not known."""
    last_right: FloatRows | None = None
    """The last stage's."""
    hold_back_tokens: int = 16
    num_prompt_tokens: FloatRows | None = None
    num_weak_tokens: FloatRows | None = None
    num_strong_tokens: FloatRows | None = None
    weak_s: FloatRows | None = None
    """To the answer's last token."""
    strong_s: FloatRows | None = None
    """To the answer's last token."""
    small_cost: FloatRows | None = None
    """Expected cost of the small model's answer. With the two below: gains are weighed by costs."""
    begun_cost: FloatRows | None = None
    """Expected cost of an answer that the small model begins and hands over."""
    large_cost: FloatRows | None = None
    """Expected cost of the large model's answer."""
    reference_cost: float = 1.0
    """Extra cost of the large model for which a gain counts in full, as `CostModel.reference`."""
    tiers: LadderRows | None = None
    """Set where there may be more than two tiers. Then the small tier is the cheapest one, the
    large tier the dearest one, and `text` is `LadderRows.qualities`."""

    def __post_init__(self) -> None:
        """Raise ValueError if there are no rows, lengths differ or a value is not finite."""
        num_rows = len(self.text)
        if not num_rows:
            raise ValueError("no prompts to judge a router by")
        for name in self.__dataclass_fields__:
            values = getattr(self, name)
            if isinstance(values, np.ndarray):
                if values.shape != (num_rows,):
                    raise ValueError(f"{name} has shape {list(values.shape)}, not [{num_rows}]")
                if not np.isfinite(values).all():
                    raise ValueError(f"{name} holds values that are not finite")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages with qualities of their own, from the first to the last."""
        stages: list[Stage] = ["text"]
        if not np.array_equal(self.text, self.prompt):
            stages.append("prompt")
        if self.answer is not None:
            stages.append("answer")
        return tuple(stages)

    def quality(self, stage: Stage) -> FloatRows:
        """A stage's qualities; the prompt's if the answers are not known."""
        if stage == "answer" and self.answer is not None:
            return self.answer
        return self.text if stage == "text" else self.prompt

    def judged(self, stage: Stage) -> FloatRows:
        """A stage's qualities as thresholds see them: for the cost, and clipped to [0, 1]."""
        quality = self.quality(stage)
        if self.large_cost is not None and self.small_cost is not None:
            extra = (self.large_cost - self.small_cost) / self.reference_cost
            quality = 1.0 - (1.0 - quality) / np.maximum(extra, 1.0)
        clipped: FloatRows = np.clip(quality, 0.0, 1.0)
        return clipped

    def cuts(self, stage: Stage) -> FloatRows:
        """Return the qualities at which thresholds part prompts."""
        return self.judged(stage) if self.tiers is None else self.tiers.cuts()


def split(
    rows: StageRows, threshold: float, band: tuple[float, float] | None
) -> tuple[Bools, Bools]:
    """Return the prompts that the large model answers, and those that begin watched: [num_prompts].

    Among more than two tiers the former are all that leave the cheapest one. Without a band all
    prompts are compared with the threshold, by the last stage that the rows have.
    """
    text = rows.judged("text")
    last = rows.judged(rows.stages[-1])
    if band is None:
        return last < threshold, np.zeros(len(text), dtype=np.bool_)
    low, high = band
    is_watched = (text >= low) & (text < high)
    return (text < low) | (is_watched & (last < threshold)), is_watched


def answered(
    rows: StageRows, threshold: float, band: tuple[float, float] | None
) -> tuple[FloatRows, FloatRows]:
    """Return the scores of the answers given, and the large model's share of each: [num_prompts].

    Among more than two tiers the share is how far the cost is from the cheapest tier's to the
    dearest's.
    """
    if rows.tiers is not None:
        scores = rows.tiers.answered(rows.tiers.scores, threshold)
        return scores, rows.tiers.cost_shares(threshold)
    is_strong, _ = split(rows, threshold, band)
    return np.where(is_strong, rows.strong, rows.weak), is_strong.astype(np.float64)


def best_answers(rows: StageRows) -> tuple[FloatRows, FloatRows]:
    """Return what `answered` would of an oracle, which takes the cheapest of the best tiers."""
    if rows.tiers is None:
        is_strong = rows.strong > rows.weak
        return np.maximum(rows.weak, rows.strong), is_strong.astype(np.float64)
    best = rows.tiers.scores.argmax(axis=0)
    return rows.tiers.scores.max(axis=0), np.array(rows.tiers.ladder.cost_shares)[best]
