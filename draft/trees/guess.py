"""A guess as every source makes it."""

from outrider.verifier.params import record


@record(frozen=True, slots=True, kw_only=True)
class Guess:
    """A chain of tokens expected behind the sequence's last one, with raw confidences.

    Guesses of one source that begin alike have the same confidences there, and their first tokens'
    sum is at most 1.
    """

    token_ids: list[int]
    edge_probs: list[float]
    """Probability that token i is right if all before it were; uncalibrated."""
    is_recalled: bool = False
    """True if a retracted answer says so."""
