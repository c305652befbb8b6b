"""Lengths of prompts and answers, from a trace or typical of chats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.gateway.tools.measuring.bench.traces import Trace

# Half of a chat's lengths lie within a factor of two of the middle.
_LOG_SPREAD: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPairs:
    """Pairs of prompt and answer lengths in tokens, drawn in turn. `name` says where from."""

    name: str
    prompts: npt.NDArray[np.int64]
    answers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.prompts)

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, in the mean."""
        return float(self.prompts.mean())

    @property
    def mean_answer(self) -> float:
        """Tokens of an answer, in the mean."""
        return float(self.answers.mean())

    @property
    def mean_held(self) -> float:
        """Mean number of tokens whose KV a request holds, over its steps."""
        weights = self.answers.astype(np.float64)
        held = self.prompts + weights / 2
        return float((held * weights).sum() / weights.sum())

    def within(self, max_context: int) -> "LengthPairs":
        """Cut to a model's context: answers first, then prompts."""
        prompts = np.minimum(self.prompts, max_context - 1)
        return replace(
            self, prompts=prompts, answers=np.minimum(self.answers, max_context - prompts)
        )

    def scaled(self, factor: float) -> "LengthPairs":
        """All lengths times a factor, at least one token."""
        prompts, answers = (
            np.maximum(np.rint(lengths * factor), 1).astype(np.int64)
            for lengths in (self.prompts, self.answers)
        )
        return replace(self, prompts=prompts, answers=answers)


def usual_lengths(
    num_prompt: float, num_answer: float, rng: np.random.Generator, *, count: int = 512
) -> LengthPairs:
    """Log-normal lengths with these means, as chats have them."""

    def drawn(mean: float) -> npt.NDArray[np.int64]:
        middle = np.log(mean) - _LOG_SPREAD**2 / 2
        return np.maximum(np.rint(rng.lognormal(middle, _LOG_SPREAD, count)), 1).astype(np.int64)

    return LengthPairs(
        name=f"log-normal, {num_prompt:g} and {num_answer:g} tokens in the mean",
        prompts=drawn(num_prompt),
        answers=drawn(num_answer),
    )


def measured_lengths(name: str, pairs: Sequence[tuple[int, int]]) -> LengthPairs:
    """Those of requests that were made."""
    prompts, answers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return LengthPairs(name=name, prompts=np.maximum(prompts, 1), answers=np.maximum(answers, 1))


def trace_lengths(trace: Trace) -> LengthPairs:
    """Those of a trace; requests without an answer count as one token."""
    pairs = [(row.num_prompt_tokens, row.num_completion_tokens) for row in trace.rows]
    return measured_lengths(f"trace {trace.name}", pairs)
