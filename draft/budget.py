"""How much to guess: the number of nodes and of passes that give most tokens per second.

The expected number of tokens of a step is one per sequence plus the sum over all nodes of the
probability that the whole path to the node is accepted; the time of a step is a staircase in its
rows. Both the tree and its size follow from the ratio (ARCHITECTURE: "Which tree"; Sequoia, Chen et
al. 2024, section 4.3, for the hardware-aware size).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PassTime = Callable[[int], float]

_EMA_WEIGHT = 0.1
_FIRST_ACCEPTANCE = 0.7
# Where drafting does not pay, about one step in thirty tries it.
_FORGETTING = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBudget:
    """Decides from the two models' pass times, seconds by number of rows."""

    target_pass_s: PassTime
    draft_pass_s: PassTime

    def is_worth_drafting(self, num_sequences: int, acceptance: float, max_depth: int) -> bool:
        """Whether chains of some depth would beat plain decoding at this batch size.

        acceptance: the chance that the best guess at a position is right.
        """
        plain = num_sequences / self.target_pass_s(num_sequences)
        gained, path_prob = 1.0, 1.0
        spent_s = 0.0
        for depth in range(1, max_depth + 1):
            path_prob *= acceptance
            gained += path_prob
            spent_s += self.draft_pass_s(num_sequences)
            step_s = spent_s + self.target_pass_s(num_sequences * (1 + depth))
            if num_sequences * gained / step_s > plain:
                return True
        return False

    def is_worth_a_pass(
        self, *, tokens_gained: float, num_rows: int, expected_tokens: float, step_s: float
    ) -> bool:
        """Whether one more draft pass raises the rate that is expected so far."""
        return tokens_gained * step_s > expected_tokens * self.draft_pass_s(num_rows)

    def num_nodes(
        self, path_probs: Sequence[float], *, num_sequences: int, spent_s: float
    ) -> tuple[int, float, float]:
        """The best number of nodes: (nodes, expected tokens, step seconds).

        path_probs: of all candidates of all sequences, descending. spent_s: draft time so far.
        """
        best = (0, float(num_sequences), spent_s + self.target_pass_s(num_sequences))
        expected = float(num_sequences)
        for number, path_prob in enumerate(path_probs, start=1):
            expected += path_prob
            step_s = spent_s + self.target_pass_s(num_sequences + number)
            if expected * best[2] > best[1] * step_s:
                best = (number, expected, step_s)
        return best


@dataclass(slots=True)
class AcceptanceEstimate:
    """A running mean of how often the likeliest guess below the root is right."""

    value: float = _FIRST_ACCEPTANCE

    def observe(self, was_right: bool) -> None:
        """Learn from one verdict."""
        self.value += _EMA_WEIGHT * (float(was_right) - self.value)

    def forget(self) -> None:
        """A step without drafts teaches nothing: doubt the estimate, so that they are tried."""
        self.value += _FORGETTING * (_FIRST_ACCEPTANCE - self.value)
