"""What changes a row's logits before the temperature: penalties, biases, a minimal length.

A rule looks at the text in front of a row and at nothing else, so a node of a tree gets what the
same token gets when it is decoded alone.
"""

from typing import Protocol

from torch import Tensor

from engine.request import SamplingParams


class LogitRule(Protocol):
    """One request's rule. It may keep what it learnt from `token_ids` between calls."""

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        """Change rows in place: row i decides the token behind `token_ids + paths[i]`.

        logits: float32 [num_rows, vocab_size], vocab_size being that of the model they come from.
        token_ids: prompt and answer; between two calls it only grows, or the answer starts over.
        """


def build_rules(sampling: SamplingParams, *, num_prompt_tokens: int) -> list[LogitRule]:
    """The rules that a request's sampling parameters ask for; none for the defaults."""
    return []
