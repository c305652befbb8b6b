"""Protocols of the parts that an engine is given: drafter and verifier."""

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.cache.kv_view import KVView
from engine.passes.device_rows import DeviceRows
from engine.passes.runner import ForwardSlice
from engine.sequences.next_tokens import NextRow, NextToken
from engine.sequences.sequence import Sequence
from engine.trees.forest import Forest, ForestVerdicts
from engine.trees.token_tree import TokenTree
from engine.trees.verdict import Verdict
from kernels.sampling.sampling_rows import SamplingTable

__all__ = [
    "DraftLogits",
    "DraftPass",
    "Drafter",
    "Proposal",
    "Trees",
    "Verdict",
    "Verifier",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """The rows that a proposal wants in the next small pass.

    device_rows: tree nodes that only the device knows, in front of the slices' rows, equally many
    for each of its views. owners: the sequences of the slices, in order, then those of the views.
    """

    slices: list[ForwardSlice]
    owners: list[Sequence]
    device_rows: DeviceRows | None = None

    def num_rows_each(self) -> list[int]:
        """Rows computed for each of the owners, padding included."""
        counts = [len(piece.token_ids) for piece in self.slices]
        if self.device_rows is not None:
            num_views = len(self.device_rows.views)
            counts += [self.device_rows.total_rows // num_views] * num_views
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLogits:
    """Logits of a draft pass, float32, valid until the small model's next pass.

    of_slices: [num_logit_rows, vocab_size], in the slices' order. of_device_rows: [total_rows,
    vocab_size], where such rows were wanted.
    """

    of_slices: Tensor
    of_device_rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """A step's trees: by request id those that the host knows, and those that the device grew."""

    host: dict[str, TokenTree]
    forest: Forest | None = None


# Rows wanted in the next small pass go out, their logits come in, the trees are returned.
Proposal = Generator[DraftPass, DraftLogits, Trees]


class Drafter(Protocol):
    """Makes guesses for large-tier sequences with the small model's passes."""

    @property
    def gives_logits(self) -> bool:
        """True if trees carry the small model's logits where a sequence has a cascade.

        Over the ids of the large model's own tokenizer, and for the root at least: a tree without
        the root's is not judged in that step, and is not committed.
        """

    def propose(self, sequences: SequenceOf[Sequence]) -> Proposal:
        """Draft one tree for each sequence, a level per small pass. May yield nothing at all.

        A forest's slots are reserved in its sequences' views when it is returned.
        """

    def propose_from_text(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        """Return guesses that cost no pass: from a prediction or a retracted answer.

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
        """Release what is held for a sequence that ended or was pre-empted."""

    def reclaim(self, num_blocks: int) -> None:
        """Give back at least so many small blocks if they are held: drafts go before answers."""


class Verifier(Protocol):
    """Judges trees. Plain decoding is a tree of one node."""

    def verify(
        self, sequences: SequenceOf[Sequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        """One verdict a sequence; logits float32 [total nodes, vocab_size], trees in order."""

    def next_tokens(self, rows: SequenceOf[NextRow], logits: Tensor) -> list[NextToken]:
        """The same rule for trees of one node: float32 [num_rows, vocab_size], one row each.

        The sequences have no cascade. Waits for the device once, whatever is asked.
        """

    def judge_forest(
        self, forest: Forest, logits: Tensor, table: SamplingTable | None = None
    ) -> ForestVerdicts:
        """The same rule for trees on the device: nothing is waited for.

        logits: float32 [forest.total_rows, vocab_size]. Its sequences have no rules and no cascade;
        table: how they choose their tokens, where that is on the device already.
        """
