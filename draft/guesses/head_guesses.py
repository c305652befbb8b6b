"""A head's share of a proposal: rows of accepted tokens with the target's features, then a tree.

The rows of a tree carry what their parents' rows gave, so a level is computed behind the one above.
When the tree is judged, its accepted nodes are computed again with the features that the large
model has for them: nothing of a tree stays in the head's cache.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from outrider.draft.budget.budget import StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.guesses.compiled_levels import CompiledLevels
from outrider.draft.guesses.head_texts import Head, HeadText, HeadTexts
from outrider.draft.guesses.model_guesses import ModelGuesses, Slices
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice
from outrider.engine.protocols import DraftPass
from outrider.verifier.token_tree import SOURCE_BIT


class HeadGuesses(ModelGuesses):
    """Makes the slices of a head's passes and turns their logits into guesses.

    `on_new`: told of a draft's new candidates.
    """

    def __init__(
        self,
        head: Head,
        *,
        texts: HeadTexts,
        config: DraftConfig,
        on_new: Callable[[Draft, SequenceOf[int]], None],
    ) -> None:
        super().__init__(
            runner=texts.runner,
            config=config,
            token_map=None,
            make_room=lambda draft, num_blocks: None,
            on_new=on_new,
        )
        self._texts = texts
        self._model = head.model
        self._vocab_size = head.vocab_size
        self._features: dict[int, Tensor] = {}  # of the pass that comes next, by slice

    def can_grow(self, draft: Draft) -> bool:
        """True if the head has computed the draft's root, or may do so."""
        return self._texts.of(draft.sequence) is not None

    @property
    def token_ids(self) -> Tensor | None:
        """The target's token of each of the logits; None for the same vocabulary."""
        return self._model.target_token_ids

    def view_of(self, draft: Draft) -> KVView | None:
        """Return the view that a draft's nodes are computed in; None where it was taken away."""
        text = self._texts.of(draft.sequence)
        return None if text is None else text.view

    def has_root(self, draft: Draft) -> bool:
        """Note that the rows of accepted tokens were computed; False if they were taken away."""
        text = self._texts.of(draft.sequence)
        if text is not None and text.num_taken:
            text.advance()
        return text is not None

    def drop_tree(self, draft: Draft) -> None:
        """Give back the slots of a tree that was judged."""
        self._texts.drop_tree(draft.sequence)

    def num_missing(self, draft: Draft) -> int:
        """Count the accepted tokens that a draft's first pass takes in."""
        return self._text(draft).num_ready

    def _levels(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        first: SequenceOf[ForwardSlice] = (),
    ) -> CompiledLevels | None:
        """Return None: a head's rows carry features."""

    def draft_pass(self, slices: Slices) -> DraftPass:
        """The pass of these slices, some of those made last, in any order."""
        features = [self._features[id(piece)] for _, piece in slices]
        return DraftPass(
            slices=[piece for _, piece in slices],
            owners=[draft.sequence for draft, _ in slices],
            model="head",
            features=torch.cat(features) if features else None,
        )

    def catch_up_slices(self, growers: SequenceOf[Draft], step: StepBudget | None = None) -> Slices:
        """The first pass: all accepted tokens that the head lacks, the root last."""
        slices: Slices = []
        taps: list[Tensor] = []
        budget = self._config.max_catch_up_tokens
        num_ready = sum([self._text(draft).num_ready for draft in growers])
        if step is not None and num_ready > 2 * len(growers):
            budget = step.most_first_rows(len(growers), budget)
        for draft in growers:
            text = self._text(draft)
            num_rows = min(text.num_ready, max(budget, 1))
            is_complete = num_rows == text.num_ready
            if not self._texts.reserve(text, text.view.num_computed_tokens + num_rows):
                draft.tree.stop()
                continue
            budget -= num_rows
            piece, own = text.take(num_rows, num_logit_rows=int(is_complete))
            tree = draft.tree
            tree.root_slot = text.root_slot
            tree.model_bit, tree.is_stepwise = SOURCE_BIT["head"], True
            tree.max_depth = min(tree.max_depth, self._texts.num_positions(text))
            text.hidden.clear()
            slices.append((draft, piece))
            taps.append(own)
        if taps:
            features = self._model.features_of_taps(torch.cat(taps))
            parts = torch.split(features, [len(own) for own in taps])
            self._features = {
                id(piece): part for (_, piece), part in zip(slices, parts, strict=True)
            }
        return slices

    def _text(self, draft: Draft) -> HeadText:
        text = self._texts.of(draft.sequence)
        assert text is not None, "a head drafts for what it reads"
        return text

    def next_slices(self, growing: SequenceOf[Draft]) -> Slices:
        """The chosen frontiers of these trees."""
        slices: Slices = []
        self._features.clear()
        for draft in growing:
            tree, text = draft.tree, self._text(draft)
            num_slots = tree.root_slot + tree.num_slots + tree.num_frontier_rows
            try:
                self._runner.copy_blocks(text.view.reserve(num_slots))
            except OutOfBlocksError:
                tree.stop()
                continue
            rows = [text.hidden[parent] for parent in tree.frontier_parents()]
            piece = tree.frontier_slice(text.view)
            self._features[id(piece)] = torch.stack(rows)
            slices.append((draft, piece))
        return slices

    def receive(self, slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Turn a pass's logits and hidden states into children and what their rows will carry."""
        assert hidden is not None, "a head's pass gives hidden states"
        kept = iter(hidden.clone())  # the head's next pass may write into the same memory
        growing: list[Draft] = []
        for draft, piece in slices:
            text = self._text(draft)
            if self.has_root(draft) and piece.num_logit_rows:
                growing.append(draft)
                text.hidden.update(zip(draft.tree.frontier, kept, strict=False))
            else:
                draft.tree.stop()
        if growing:
            self.add_children(growing, self._to_target(logits))

    def _to_target(self, logits: Tensor) -> Tensor:
        """Logits over the large model's tokens, -inf where the head has none."""
        token_ids = self._model.target_token_ids
        if token_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._vocab_size), -math.inf)
        return wide.index_copy_(1, token_ids, logits)
