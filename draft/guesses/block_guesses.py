"""A block drafter's share of a proposal: one pass guesses the tokens at several depths.

What it says of a depth does not depend on the tokens above it. So its candidates make a tree of
products: any of depth 2 may follow any of depth 1, with the product of their chances. The tree of
the likeliest paths is found without another pass.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Final

import torch
from torch import Tensor

from outrider.draft.budget.budget import StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.guesses.head_guesses import HeadGuesses
from outrider.draft.guesses.head_texts import Head, HeadTexts
from outrider.draft.guesses.model_guesses import LikelyTokens, Slices
from outrider.draft.heads.protocol import BlockLayout
from outrider.draft.trees.tree_batch import DraftTree
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.passes.runner import ForwardSlice
from outrider.verifier.sampling import RowGroup

_RANKED_TOGETHER: Final = 128
"""Rows of logits: as many as tens of trees have in a level, for memory's sake."""


class BlockGuesses(HeadGuesses):
    """Makes the slices of a block drafter's passes and trees of what their logits say."""

    def __init__(
        self,
        head: Head,
        *,
        texts: HeadTexts,
        config: DraftConfig,
        on_new: Callable[[Draft, SequenceOf[int]], None],
    ) -> None:
        """See `HeadGuesses`; the head must have a block."""
        super().__init__(head, texts=texts, config=config, on_new=on_new)
        assert head.model.block is not None, "this head guesses a token a pass"
        self._block: BlockLayout = head.model.block

    @property
    def block(self) -> BlockLayout | None:
        """The rows of its pass."""
        return self._block

    # ---- the pass --------------------------------------------------------------------------

    def catch_up_slices(self, growers: SequenceOf[Draft], step: StepBudget | None = None) -> Slices:
        """The only pass: all accepted tokens that the head lacks, and behind the root the block."""
        slices: Slices = []
        for draft, piece in super().catch_up_slices(growers, step):
            draft.tree.is_stepwise = False  # nothing is computed of a node
            slices.append((draft, piece))
            if piece.num_logit_rows and not self._reserve_block(piece):
                piece.num_logit_rows = 0
            if not piece.num_logit_rows:
                draft.tree.stop()
            elif self._block.is_behind_text:
                slices.append((draft, self._block_behind(piece)))
            else:
                self._append_masks(piece)
        return slices

    def _reserve_block(self, piece: ForwardSlice) -> bool:
        num_slots = piece.end_slot + self._block.num_slots_behind
        try:
            self._runner.copy_blocks(piece.view.reserve(num_slots))
        except OutOfBlocksError:
            return False
        return True

    def _block_behind(self, piece: ForwardSlice) -> ForwardSlice:
        """The block of a head whose text rows have no logits: rows of their own, behind them."""
        block, features = self._block, self._features[id(piece)]
        piece.num_logit_rows = 0
        own = ForwardSlice(
            view=piece.view,
            token_ids=block.token_ids(piece.token_ids[-1]),
            start_slot=piece.end_slot,
            num_logit_rows=block.num_rows,
            tree_start=piece.end_slot,
            ancestor_masks=block.ancestor_masks(),
        )
        self._features[id(own)] = features.new_zeros((block.num_rows, features.shape[1]))
        return own

    def _append_masks(self, piece: ForwardSlice) -> None:
        """Append masks to the text; its last row is the block's first."""
        block, features = self._block, self._features[id(piece)]
        masks = block.token_ids(piece.token_ids[-1])[1:]
        piece.token_ids = piece.token_ids + masks
        piece.num_logit_rows = block.num_rows
        assert self._model.mask_features is not None, "such a block's rows carry features"
        of_masks = self._model.mask_features.expand(len(masks), -1)
        self._features[id(piece)] = torch.cat((features, of_masks))

    def next_slices(self, growing: SequenceOf[Draft]) -> Slices:
        """Return nothing: one pass has guessed all depths."""
        return []

    # ---- the trees -------------------------------------------------------------------------

    def receive(self, slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Grow the trees of the likeliest products; see `HeadGuesses.receive`."""
        blocks: list[tuple[Draft, Tensor]] = []  # [num_depths, draft vocabulary] each
        row = 0
        for draft, piece in slices:
            first, row = row + self._block.first_row, row + piece.num_logit_rows
            if not self.has_root(draft):
                draft.tree.stop()
            elif piece.num_logit_rows:
                self.drop_tree(draft)  # the block's slots
                draft.state.was_asked = draft.may_ask_model
                blocks.append((draft, logits[first:row]))
        plain = [each for each in blocks if not each[0].sequence.rules]
        number = max(_RANKED_TOGETHER // self._block.num_depths, 1)
        for start in range(0, len(plain), number):
            self._grow_plain(plain[start : start + number])
        self._grow_by_rules([each for each in blocks if each[0].sequence.rules])
        for draft, _ in blocks:
            draft.tree.stop()  # there is no further pass

    def _grow_plain(self, blocks: SequenceOf[tuple[Draft, Tensor]]) -> None:
        """Grow trees in which all nodes of a depth have the same children."""
        num_depths = self._block.num_depths
        groups = [
            RowGroup(sequence=draft.sequence, depths=list(range(num_depths)), paths=list)
            for draft, _ in blocks
        ]
        logits = self._to_target(torch.cat([own for _, own in blocks]))
        ranked = self._likeliest(logits, groups)
        for number, (draft, _) in enumerate(blocks):
            if draft.state.was_asked:
                children = ranked[number * num_depths : (number + 1) * num_depths]
                grow_products(draft.tree, children, min_path_prob=self._config.min_path_prob)

    def _grow_by_rules(self, blocks: SequenceOf[tuple[Draft, Tensor]]) -> None:
        """Grow trees whose nodes' children depend on their paths: by grammars and penalties."""
        logits = {id(draft): own for draft, own in blocks}
        growing = [draft for draft, _ in blocks]
        for _ in range(self._block.num_depths if blocks else 0):
            rows = [logits[id(draft)][draft.tree.frontier_depths()] for draft in growing]
            self.add_children(growing, self._to_target(torch.cat(rows)))
            growing = [
                draft
                for draft in growing
                if draft.tree.choose_open(
                    most=self._config.max_frontier, min_path_prob=self._config.min_path_prob
                )
            ]
            if not growing:
                break


def grow_products(
    tree: DraftTree, children: SequenceOf[LikelyTokens], *, min_path_prob: float
) -> None:
    """Add the likeliest paths of a tree whose nodes at depth d all have the children number d."""
    while tree.frontier:
        tree.grow([children[depth] for depth in tree.frontier_depths()])
        tree.choose_open(most=tree.max_nodes, min_path_prob=min_path_prob)
