"""Chooses the number of nodes and of draft passes that give most tokens per second.

The expected number of tokens of a step is one per sequence plus the sum over all nodes of the
probability that the whole path to the node is accepted. The time of a step is a staircase in its
rows. Both the tree and its size follow from the ratio (docs/architecture.md, "Which tree"; Sequoia,
Chen et al. 2024, section 4.3, for the hardware-aware size). A request that is behind its own pace
counts for more than its tokens (cf. AdaServe, Li et al. 2025).
"""

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.protocols import DraftModel

# Guesses from text lower the worth of asking the small model by at most this share.
MOST_BELIEVED = 0.7

# Up to so many streams may wait for a step as long as `TreeBudget.unseen_s`.
_FEW = 2

Floats = npt.NDArray[np.float64]

_FIRST_WEIGHT, _LAST_WEIGHT = 1 / 3, 0.07
# The least weight of an answer's first verdict: what others' texts said counts as three of them.
_OWN_WEIGHT = 1 / 4
_FORGETTING = 0.003
FIRST_ACCEPTANCE = 0.7
# What a model takes in before it can draft is spread over at most so many steps.
MOST_STEPS = 32
NOTHING_READ: Final[Mapping[str, int]] = {}


class PassTimeEstimate(Protocol):
    """Expected seconds of a model's pass."""

    def __call__(self, num_rows: int, context: float = 0.0) -> float:
        """Return the seconds of a pass whose rows see `context` tokens each, on average."""

    def compared(self, least_rows: int, num_rows: int, context: float = 0.0) -> Floats:
        """Return the seconds of passes with `least_rows` to `num_rows` rows.

        To be compared with each other: some may be doubted, where a call has no doubts.
        """

    def each(self, num_rows: int, context: float = 0.0) -> Floats:
        """Return what a call gives for 0 to `num_rows` rows, [num_rows + 1]."""


@dataclass(slots=True, kw_only=True)
class DraftGain:
    """The tokens that drafting for one sequence may bring."""

    acceptance: float
    """The chance that the small model's best guess at a position is right."""
    text_tokens: float = 0.0
    """Expected tokens of the guesses that the tree holds already."""
    urgency: float = 1.0
    """The weight of a token."""
    catch_up_rows: int = 1
    """Tokens that the small model takes in before it can draft, the last one included."""
    num_steps: int = MOST_STEPS
    """Steps that the sequence may still have, at most."""

    def gain(self, max_depth: int) -> float:
        """Tokens that a chain of this depth adds, weighted."""
        ratio = min(self.acceptance, 0.999)
        chain = ratio * (1.0 - ratio**max_depth) / (1.0 - ratio)
        return self.urgency * (chain - MOST_BELIEVED * min(self.text_tokens, chain))


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """One step's budget, and how much of it drafts have spent."""

    target_pass_s: PassTimeEstimate
    draft_pass_s: PassTimeEstimate
    num_rows: int
    """Rows of the step's large pass, without guesses."""
    context: float
    """The tokens that these rows see on average."""
    base_tokens: float
    """Tokens, weighted by urgency, that the step yields without a guess."""
    longest_s: float
    """Bound on the seconds of a step that has guesses, without those of prompts beside it."""
    has_company: bool = False
    """Other sequences decode in the step."""
    step_host_s: float = 0.0
    """Seconds of the host's work in any step."""
    part_host_s: float = 0.0
    """Seconds of the host's work for a level of drafts, and the same for the trees."""
    prompts_share: float = 0.0
    """The share of the large pass, without guesses, that prompts take. It is spent in any case, so
    it makes no guess look cheap beside it."""
    num_block_rows: int = 0
    """Rows of the one pass that guesses all depths of a sequence; 0 where every level is a pass."""
    passes_s: float = 0.0
    """Expected seconds of the draft passes so far."""
    num_levels: int = 0
    """Number of draft passes so far."""
    reading_s: dict[str, float] = field(default_factory=dict)
    """Expected seconds for what was read of requests' texts, by request id. It serves all steps to
    come, so it makes no guess of this one look cheap."""

    @property
    def room_s(self) -> float:
        """Return what the step may last, less what was read in it, if others wait for that."""
        return self.longest_s - (sum(self.reading_s.values()) if self.has_company else 0.0)

    @property
    def spent_s(self) -> float:
        """Expected seconds of the step so far, and of the host's work in any step."""
        return self.step_host_s + self.passes_s + self.num_levels * self.part_host_s

    def most_first_rows(self, num_texts: int, limit: int) -> int:
        """Return the rows of a first pass that have room in the step, `limit` at most.

        Two rows for each of `num_texts` texts always have; beside prompts no more do. A sequence
        that is alone waits for no other's text, so all rows have.
        """
        if not self.has_company:
            return limit
        if self.prompts_share:
            return 2 * num_texts
        plain_s = self.step_host_s + float(self.target_s(0)[0]) + self.part_host_s
        room_s = self.longest_s - plain_s
        rows = bisect_right(range(limit), room_s, key=lambda n: self.level_s(n + 1))
        return max(rows, 2 * num_texts)

    def spend(self, num_rows: int, num_read: Mapping[str, int] = NOTHING_READ) -> None:
        """Count a draft pass with so many rows.

        `num_read`: those of each request that read its text, less its root. One token of each is
        what any step takes in.
        """
        seconds, most_read = self.draft_pass_s(num_rows, self.context), sum(num_read.values())
        if most_read > len(num_read):
            reading_s = seconds - self.draft_pass_s(num_rows - most_read, self.context)
            for request_id, number in num_read.items():
                self.reading_s[request_id] = reading_s * number / most_read
            seconds -= reading_s
        self.passes_s += seconds
        self.num_levels += 1

    def target_s(self, num_nodes: int) -> Floats:
        """Expected seconds of the large pass with 0 to `num_nodes` guesses, [num_nodes + 1].

        Without those that prompts take.
        """
        most_rows = self.num_rows + num_nodes
        seconds = self.target_pass_s.compared(self.num_rows, most_rows, self.context)
        return seconds - self.prompts_share * seconds[0] if self.prompts_share else seconds

    def level_s(self, num_rows: int) -> float:
        """Expected seconds of a level of drafts with so many rows."""
        return self.draft_pass_s(num_rows, self.context) + self.part_host_s

    def num_worth_drafting(
        self, gains: SequenceOf["DraftGain"], text_probs: Floats, max_depth: int
    ) -> int:
        """Count the sequences, in the order given, for which the small model is worth asking.

        `text_probs`: path probabilities of all guesses that are there already, weighted by urgency,
        descending. Considers chains of every depth for the first 1, 2, 4, … sequences.
        """
        num_text_nodes, text_tokens, text_s = self.num_nodes(text_probs)
        if not gains or max_depth <= 0:
            return 0
        numbers = [1 << power for power in range((len(gains) - 1).bit_length())]
        numbers.append(len(gains))
        # [len(numbers), max_depth]: tokens of chains of each depth for so many sequences.
        added = self._added(gains, max_depth).cumsum(0)[[number - 1 for number in numbers]]
        rates = self._best_rates(
            np.array(numbers), text_tokens + added, num_text_nodes, self._catch_up_s(gains, numbers)
        )
        best = int(np.argmax(rates))
        return numbers[best] if rates[best] > text_tokens / text_s else 0

    def best_rate(self, gains: SequenceOf["DraftGain"], max_depth: int) -> float:
        """Return the rate of the best chains for all these sequences, in that of a plain step."""
        added = self._added(gains, max_depth).sum(0)[None]  # [1, max_depth]
        number, nothing = np.array([len(gains)]), np.zeros((1, 1))
        (best,) = self._best_rates(number, self.base_tokens + added, 0, nothing).tolist()
        return float(best * (self.spent_s + self.target_s(0)[0]) / self.base_tokens)

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

    def _catch_up_s(self, gains: SequenceOf["DraftGain"], numbers: list[int]) -> Floats:
        """Seconds a step of what the model takes in for so many sequences, [len(numbers), 1]."""
        rows = np.array([gain.catch_up_rows for gain in gains])
        num_steps = np.array([min(max(gain.num_steps, 1), MOST_STEPS) for gain in gains])
        lasts = [number - 1 for number in numbers]
        totals, shares = rows.cumsum()[lasts], (rows / num_steps).cumsum()[lasts]
        found = [
            self.draft_pass_s(int(total), self.context) * share / total
            for total, share in zip(totals, shares, strict=True)
        ]
        return np.array(found)[:, None]

    def _best_rates(
        self,
        numbers: npt.NDArray[np.int64],
        gained: Floats,
        num_text_nodes: int,
        catch_up_s: Floats,
    ) -> Floats:
        """Tokens per second of the best depth of chains for so many sequences, [len(numbers)].

        `gained`: tokens of a step with such chains, [len(numbers), max_depth].
        """
        depths = np.arange(1, gained.shape[1] + 1)
        num_nodes = np.maximum(numbers[:, None] * depths, num_text_nodes)
        target_s = self.target_s(int(num_nodes[-1, -1]))
        if self.num_block_rows:  # one pass for all depths
            drafts_s = np.array([[self.level_s(int(n) * self.num_block_rows)] for n in numbers])
        else:
            drafts_s = depths * [[self.level_s(int(number))] for number in numbers]
        step_s = drafts_s + target_s[num_nodes]
        step_s += self.spent_s + self.part_host_s
        rates: Floats = np.where(step_s <= self.room_s, gained / (step_s + catch_up_s), 0.0).max(1)
        return rates

    def is_worth_a_pass(
        self, path_probs: Floats, *, tokens_gained: float, num_rows: int, num_trees: int
    ) -> bool:
        """True if one more draft pass, for so many trees, raises the rate that is expected so far.

        `path_probs`: as for `num_nodes`. Each tree has one more node judged, or another in place of
        one of the least likely.
        """
        num_nodes, expected_tokens, step_s = self.num_nodes(path_probs)
        level_s, target_s = self.level_s(num_rows), self.target_s(num_nodes + num_trees)
        more_s = level_s + float(target_s[-1] - target_s[num_nodes])
        replaced = 0.0  # one after the other, as the compiled library adds them
        for prob in path_probs[max(num_nodes - num_trees, 0) : num_nodes].tolist():
            replaced += prob
        ways = [(tokens_gained, more_s)]
        if num_nodes >= num_trees:
            ways.append((tokens_gained - replaced, level_s))
        room_s = self.room_s
        return any(
            step_s + seconds <= room_s and tokens * step_s > expected_tokens * seconds
            for tokens, seconds in ways
        )

    def num_nodes(self, path_probs: Floats) -> tuple[int, float, float]:
        """The best number of nodes: (nodes, expected tokens, step seconds).

        `path_probs`: of all candidates of all sequences, weighted by urgency, descending.
        """
        # This runs for every level of drafts: numpy's methods cost less than its functions.
        expected = np.zeros(len(path_probs) + 1)
        path_probs.cumsum(out=expected[1:])
        expected += self.base_tokens
        step_s = self.target_s(len(path_probs)) + (self.spent_s + self.part_host_s)
        step_s[0] -= self.part_host_s
        rates = expected / step_s
        plain_rate = rates[0]
        np.putmask(rates, step_s > self.room_s, 0.0)
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
    unseen_in_company_s: float = 0.013
    """The same with more streams: 75 pieces of text a second, as many as a screen draws. With the
    stretch alone, a large model that takes 5 ms a token would be left without drafts."""

    def of_step(  # noqa: PLR0913 - all that a step is known by
        self,
        model: DraftModel = "small",
        *,
        num_sequences: int,
        context: float,
        base_tokens: float,
        num_prompt_rows: int = 0,
        most_stretch: float = inf,
        step_host_s: float = 0.0,
        part_host_s: float = 0.0,
        num_block_rows: int = 0,
    ) -> StepBudget:
        """The budget of one step that `model` drafts in; see `StepBudget`.

        `num_sequences`: that decode together, beside prompts with `num_prompt_rows` rows.
        `most_stretch`: how many plain steps it may last for the sake of each one's own pace.
        """
        plain_pass_s, prompts_share = self.target_pass_s(num_sequences, context), 0.0
        plain_s = step_host_s + plain_pass_s
        longest_s, num_rows = self.max_stretch * plain_s, num_sequences + num_prompt_rows
        if num_prompt_rows:  # a step that is long already is no place for a pause that is not seen
            prompts_share = max(1.0 - plain_pass_s / self.target_pass_s(num_rows, context), 0.0)
        else:
            is_company = num_sequences > _FEW
            longest_s = max(longest_s, self.unseen_in_company_s if is_company else self.unseen_s)
        return StepBudget(
            target_pass_s=self.target_pass_s,
            draft_pass_s=(self.head_pass_s if model == "head" else None) or self.draft_pass_s,
            num_rows=num_rows,
            context=context,
            base_tokens=base_tokens,
            step_host_s=step_host_s,
            part_host_s=part_host_s,
            prompts_share=prompts_share,
            num_block_rows=num_block_rows,
            longest_s=min(longest_s, most_stretch * plain_s),
            has_company=num_sequences > 1,
        )


@dataclass(slots=True)
class AcceptanceEstimate:
    """A running mean of how often the likeliest guess below the root is right."""

    value: float = FIRST_ACCEPTANCE
    weight: float = _FIRST_WEIGHT
    """Of the next verdict: nothing is known at first."""

    def of_one(self) -> "AcceptanceEstimate":
        """Return what an answer begins with, whose own text soon counts for more than others'."""
        return AcceptanceEstimate(self.value, max(self.weight, _OWN_WEIGHT))

    def observe(self, was_right: bool) -> None:
        """Learn from one verdict."""
        self.value += self.weight * (float(was_right) - self.value)
        self.weight = max(self.weight / (1.0 + self.weight), _LAST_WEIGHT)

    def forget(self) -> None:
        """A step without drafts teaches nothing: doubt the estimate, so that they are tried."""
        self.value += _FORGETTING * (FIRST_ACCEPTANCE - self.value)
