"""Chooses the number of nodes and of draft passes that give most tokens per second.

The expected number of tokens of a step is one per sequence plus the sum over all nodes of the
probability that the whole path to the node is accepted. The time of a step is a staircase in its
rows. Both the tree and its size follow from the ratio (docs/architecture.md, "Which tree"; Sequoia,
Chen et al. 2024, section 4.3, for the hardware-aware size). A request that is behind its own pace
counts for more than its tokens (cf. AdaServe, Li et al. 2025).
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.protocols import DraftModel

# Guesses from text lower the worth of asking the small model by at most this share.
MOST_BELIEVED = 0.7

# Up to so many streams may wait for a step as long as `TreeBudget.unseen_s`.
_FEW = 2

Floats = npt.NDArray[np.float64]

_EMA_WEIGHT = 0.1
_FIRST_ACCEPTANCE = 0.7
# Where drafting does not pay, about one step in thirty tries it.
_FORGETTING = 0.002


class PassTimeEstimate(Protocol):
    """Expected seconds of a model's pass."""

    def __call__(self, num_rows: int, context: float = 0.0) -> float:
        """Return the seconds of a pass whose rows see `context` tokens each, on average."""

    def upto(self, num_rows: int, context: float = 0.0) -> Floats:
        """Return the seconds of passes with 0 to `num_rows` rows, [num_rows + 1]."""


@dataclass(slots=True, kw_only=True)
class DraftGain:
    """The tokens that drafting for one sequence may bring."""

    acceptance: float
    """The chance that the small model's best guess at a position is right."""
    text_tokens: float = 0.0
    """Expected tokens of the guesses that the tree holds already."""
    urgency: float = 1.0
    """The weight of a token."""

    def gain(self, max_depth: int) -> float:
        """Tokens that a chain of this depth adds, weighted."""
        ratio = min(self.acceptance, 0.999)
        chain = ratio * (1.0 - ratio**max_depth) / (1.0 - ratio)
        return self.urgency * (chain - MOST_BELIEVED * min(self.text_tokens, chain))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """One step's budget."""

    target_pass_s: PassTimeEstimate
    draft_pass_s: PassTimeEstimate
    num_rows: int
    """Rows of the step's large pass, without guesses."""
    context: float
    """The tokens that these rows see on average."""
    base_tokens: float
    """Tokens, weighted by urgency, that the step yields without a guess."""
    longest_s: float
    """Bound on the seconds of a step that has guesses."""
    level_host_s: float = 0.0
    """Seconds of a level of drafts beside its pass."""
    beside_s: float = 0.0
    """Seconds of any step beside its levels and its large pass."""
    num_block_rows: int = 0
    """Rows of the one pass that guesses all depths of a sequence; 0 where every level is a pass."""

    def level_s(self, num_rows: int) -> float:
        """Expected seconds of a level of drafts with so many rows."""
        return self.draft_pass_s(num_rows, self.context) + self.level_host_s

    def num_worth_drafting(
        self, gains: SequenceOf["DraftGain"], text_probs: Floats, max_depth: int
    ) -> int:
        """Count the sequences, in the order given, for which the small model is worth asking.

        `text_probs`: path probabilities of all guesses that are there already, weighted by urgency,
        descending. Considers chains of every depth for the first 1, 2, 4, … sequences.
        """
        num_text_nodes, text_tokens, text_s = self.num_nodes(text_probs, spent_s=0.0)
        if not gains or max_depth <= 0:
            return 0
        numbers = [1 << power for power in range((len(gains) - 1).bit_length())]
        numbers.append(len(gains))
        # [len(numbers), max_depth]: tokens of chains of each depth for so many sequences.
        added = self._added(gains, max_depth).cumsum(0)[[number - 1 for number in numbers]]
        rates = self._best_rates(np.array(numbers), text_tokens + added, num_text_nodes)
        best = int(np.argmax(rates))
        return numbers[best] if rates[best] > text_tokens / text_s else 0

    @staticmethod
    def _added(gains: SequenceOf["DraftGain"], max_depth: int) -> Floats:
        """Tokens that a chain of each depth adds for each sequence, [len(gains), max_depth]."""
        known = np.array([(gain.acceptance, gain.text_tokens, gain.urgency) for gain in gains])
        acceptance, believed, weights = known.T[:, :, None]  # [len(gains), 1] each
        powers = np.repeat(acceptance, max_depth, axis=1).cumprod(1)
        chains = powers.cumsum(1)
        # What the text says already would be said twice.
        added: Floats = weights * (chains - MOST_BELIEVED * np.minimum(believed, chains))
        return added

    def _best_rates(
        self, numbers: npt.NDArray[np.int64], gained: Floats, num_text_nodes: int
    ) -> Floats:
        """Tokens per second of the best depth of chains for so many sequences, [len(numbers)].

        `gained`: tokens of a step with such chains, [len(numbers), max_depth].
        """
        depths = np.arange(1, gained.shape[1] + 1)
        num_nodes = np.maximum(numbers[:, None] * depths, num_text_nodes)
        target_s = self.target_pass_s.upto(self.num_rows + int(num_nodes[-1, -1]), self.context)
        if self.num_block_rows:  # one pass for all depths
            draft_s = [[self.level_s(int(number) * self.num_block_rows)] for number in numbers]
            step_s = self.beside_s + np.array(draft_s)
        else:
            step_s = self.beside_s + depths * [[self.level_s(int(number))] for number in numbers]
        step_s = step_s + target_s[self.num_rows + num_nodes]
        rates: Floats = np.where(step_s <= self.longest_s, gained / step_s, 0.0).max(1)
        return rates

    def is_worth_a_pass(
        self, *, tokens_gained: float, num_rows: int, expected_tokens: float, step_s: float
    ) -> bool:
        """True if one more draft pass raises the rate that is expected so far."""
        pass_s = self.level_s(num_rows)
        if step_s + pass_s > self.longest_s:
            return False
        return tokens_gained * step_s > expected_tokens * pass_s

    def num_nodes(self, path_probs: Floats, *, spent_s: float) -> tuple[int, float, float]:
        """The best number of nodes: (nodes, expected tokens, step seconds).

        `path_probs`: of all candidates of all sequences, weighted by urgency, descending.
        `spent_s`: draft time so far.
        """
        # This runs for every level of drafts: numpy's methods cost less than its functions.
        expected = np.zeros(len(path_probs) + 1)
        path_probs.cumsum(out=expected[1:])
        expected += self.base_tokens
        target_s = self.target_pass_s.upto(self.num_rows + len(path_probs), self.context)
        step_s = target_s[self.num_rows :] + (self.beside_s + spent_s)
        rates = expected / step_s
        plain_rate = rates[0]
        np.putmask(rates, step_s > self.longest_s, 0.0)
        rates[0] = plain_rate
        best = int(rates.argmax())
        return best, expected.item(best), step_s.item(best)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBudget:
    """Decides from the models' pass times.

    A step with guesses takes longer than a plain one, and every stream waits for it. A stream whose
    own guesses fail gains nothing from that wait.
    """

    target_pass_s: PassTimeEstimate
    draft_pass_s: PassTimeEstimate
    head_pass_s: PassTimeEstimate | None = None
    """The pass time of a head, where one drafts."""
    max_stretch: float = 1.3
    """A step with guesses may take this many times as long as a plain one."""
    unseen_s: float = 0.08
    """A pause that no reader notices. Up to two streams may wait this long for a step in any case:
    most of its tokens are theirs."""
    unseen_in_company_s: float = 0.02
    """The same with more streams: 50 tokens a second. With the stretch alone, a large model that
    takes 5 ms a token would be left without drafts."""

    def of_step(  # noqa: PLR0913 - all that a step is known by
        self,
        model: DraftModel = "small",
        *,
        num_sequences: int,
        context: float,
        base_tokens: float,
        num_prompt_rows: int = 0,
        most_stretch: float = inf,
        level_host_s: float = 0.0,
        beside_s: float = 0.0,
        num_block_rows: int = 0,
    ) -> StepBudget:
        """The budget of one step that `model` drafts in; see `StepBudget`.

        `num_sequences`: that decode together, beside prompts with `num_prompt_rows` rows.
        `most_stretch`: how many plain steps it may last for the sake of each one's own pace.
        """
        plain_s = beside_s + self.target_pass_s(num_sequences, context)
        longest_s, prompts_s = self.max_stretch * plain_s, 0.0
        if num_prompt_rows:  # a step that is long already is no place for a pause that is not seen
            num_rows = num_sequences + num_prompt_rows
            prompts_s = beside_s + self.target_pass_s(num_rows, context) - plain_s
        else:
            is_company = num_sequences > _FEW
            longest_s = max(longest_s, self.unseen_in_company_s if is_company else self.unseen_s)
        return StepBudget(
            target_pass_s=self.target_pass_s,
            draft_pass_s=(self.head_pass_s if model == "head" else None) or self.draft_pass_s,
            num_rows=num_sequences + num_prompt_rows,
            context=context,
            base_tokens=base_tokens,
            level_host_s=level_host_s,
            beside_s=beside_s,
            num_block_rows=num_block_rows,
            longest_s=min(longest_s, most_stretch * plain_s) + prompts_s,
        )


@dataclass(slots=True)
class AcceptanceEstimate:
    """A running mean of how often the likeliest guess below the root is right."""

    value: float = field(default=_FIRST_ACCEPTANCE)

    def observe(self, was_right: bool) -> None:
        """Learn from one verdict."""
        self.value += _EMA_WEIGHT * (float(was_right) - self.value)

    def forget(self) -> None:
        """A step without drafts teaches nothing: doubt the estimate, so that they are tried."""
        self.value += _FORGETTING * (_FIRST_ACCEPTANCE - self.value)
