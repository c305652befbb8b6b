"""A guess as every source makes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A chain of tokens expected behind the sequence's last one, with raw confidences.

    `edge_probs[i]` says how likely token i is right if all before it were; uncalibrated. Guesses of
    one source that begin alike have the same confidences there, and their first tokens' sum is at
    most 1. is_recalled: whether a retracted answer says so.
    """

    token_ids: list[int]
    edge_probs: list[float]
    is_recalled: bool = False
