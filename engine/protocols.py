"""What the engine needs from others and receives at construction."""

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from engine.kv_view import KVView
from engine.runner import ForwardSlice
from engine.sequence import Sequence
from engine.token_tree import TokenTree

# Slices wanted in the next small pass go out, the logits of their rows come in
# ([num_rows, vocab_size], in the slices' order), the trees are returned.
Proposal = Generator[list[ForwardSlice], Tensor, list[TokenTree]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the target made of one tree.

    accepted_nodes: the accepted path without the root. token_ids: the accepted tokens and the next
    one. The verdict on a cascade is open where the path ends at a node whose small distribution is
    not known: token_ids are the accepted ones then, and the last of them is the next step's root,
    to be computed again. Where not even the root's is known, both lists are empty. unratified: for
    each emitted token, whether the large model alone would have chosen another; empty: for none.
    """

    accepted_nodes: list[int]
    token_ids: list[int]
    unratified: list[bool] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were right; the next token is not counted."""
        return len(self.accepted_nodes)

    @property
    def nodes(self) -> list[int]:
        """For each emitted token, the node whose logits chose it."""
        return [0, *self.accepted_nodes][: len(self.token_ids)]


class Drafter(Protocol):
    """Makes guesses for large-tier sequences with the small model's passes."""

    @property
    def gives_logits(self) -> bool:
        """Whether trees carry the small model's logits where a sequence has a cascade.

        Over the ids of the large model's own tokenizer, and for the root at least: a tree without
        the root's is not judged in that step, and is not committed.
        """

    def propose(self, sequences: SequenceOf[Sequence]) -> Proposal:
        """Draft one tree for each sequence, a level per small pass. May yield nothing at all."""

    def recall(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        """What is known of the text ahead without a pass: a prediction, a retracted answer.

        Asked for a sequence whose prefill is complete in this pass, which judges the tree too; its
        root is the last token. At most `max_nodes` guesses; the pass has `num_rows` rows without
        them, and `num_beside` other sequences wait for it. A verdict on it is committed as well.
        """

    def commit(self, sequence: Sequence, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Learn the verdict; returns (source, destination) slots to move in the small KV cache.

        Called before the emitted tokens are appended to the sequence.
        """

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        """Go on drafting for the sequence from a small view that exists already.

        Called before an answer is retracted: the view's computed slots hold `sequence.token_ids`.
        """

    def release(self, sequence: Sequence) -> None:
        """Let go of what is held for a sequence that ended or lost its place."""

    def reclaim(self, num_blocks: int) -> None:
        """Give back at least so many small blocks if they are held: drafts go before answers."""


class Verifier(Protocol):
    """Judges trees. Plain decoding is a tree of one node."""

    def verify(
        self, sequences: SequenceOf[Sequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        """One verdict a sequence; logits float32 [total nodes, vocab_size], trees in order."""


class QueuePolicy(Protocol):
    """Orders `Scheduler.waiting`."""

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """The sequences in the order in which they should start."""


class ArrivalOrder:
    """First come, first served; a pre-empted sequence is back at its old place."""

    def order(self, waiting: list[Sequence], now_s: float) -> list[Sequence]:
        """Oldest first."""
        return sorted(waiting, key=lambda sequence: sequence.arrival_number)
