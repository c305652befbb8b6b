"""The small model's share of a proposal: catching up, a level a pass, children from logits."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from outrider.draft.budget.budget import StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft, DraftState
from outrider.draft.guesses.compiled_levels import CompiledLevels, compiled_levels
from outrider.draft.guesses.cut_tokens import has_cut_tokens, scores_with_cut_tokens
from outrider.draft.heads.protocol import BlockLayout
from outrider.draft.text.token_map import TokenMap
from outrider.draft.trees.tree_batch import DraftTree, frontier_slices, grow_rows
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import DraftPass
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.sampling.likeliest import Likeliest, likeliest_tokens
from outrider.verifier.sampling import RowGroup, perturbed_scores, takes_greatest

Slices = list[tuple[Draft, ForwardSlice]]
LikelyTokens = list[tuple[int, float]]  # token ids and their chances


class ModelGuesses:
    """Makes the slices of draft passes and turns their logits into guesses.

    `make_room`: lets the drafts of later arrivals go until so many blocks are free, for a sequence
    that cannot go on without its root. `on_new`: told of a draft's new candidates.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        config: DraftConfig,
        token_map: TokenMap | None,
        make_room: Callable[[Sequence, int], None],
        on_new: Callable[[Draft, SequenceOf[int]], None],
    ) -> None:
        self._runner = runner
        self._config = config
        self._token_map = token_map
        self._make_room = make_room
        self._on_new = on_new

    @property
    def block(self) -> BlockLayout | None:
        """The rows of the one pass that guesses all depths; None where a pass guesses one."""
        return None

    def can_grow(self, draft: Draft) -> bool:
        """True unless the draft's view was taken away."""
        return draft.state.view is not None

    @property
    def runner(self) -> ModelRunner:
        """The model's runner."""
        return self._runner

    @property
    def token_ids(self) -> Tensor | None:
        """The target's token of each of the logits; None for the same vocabulary."""
        return None

    def view_of(self, draft: Draft) -> KVView | None:
        """Return the view that a draft's nodes are computed in; None where it was taken away."""
        return draft.state.view

    def has_root(self, draft: Draft) -> bool:
        """Note that the root was computed; False if its view was taken away meanwhile."""
        return draft.state.view is not None and draft.state.caught_up()

    def drop_tree(self, draft: Draft) -> None:
        """Give back the slots of a tree that was judged, where nothing of it is kept."""

    def num_missing(self, draft: Draft) -> int:
        """Count the tokens that a draft's first pass takes in; opens its view."""
        return self._open(draft).num_missing_tokens

    def _open(self, draft: Draft) -> DraftState:
        """Return the draft's state, with a view that holds what the prefix cache knows."""
        draft.state.open(self._runner)
        return draft.state

    def draft_pass(self, slices: Slices) -> DraftPass:
        """The pass of these slices."""
        return DraftPass(
            slices=[piece for _, piece in slices], owners=[draft.sequence for draft, _ in slices]
        )

    def catch_up_slices(self, growers: SequenceOf[Draft], step: StepBudget | None = None) -> Slices:
        """The first pass: all tokens that the small model lacks, the root last.

        Together at most `max_catch_up_tokens` rows, and what others may wait for; each sequence at
        least one: what does not fit is taken in by the next steps.
        """
        slices = []
        budget = self._config.max_catch_up_tokens
        if step is not None and sum(map(self.num_missing, growers)) > 2 * len(growers):
            budget = step.most_first_rows(len(growers), budget)
        for draft in growers:
            state = self._open(draft)
            assert state.view is not None
            state.rewind()
            draft.tree.max_depth = min(draft.tree.max_depth, self.num_positions(draft))
            num_tokens = min(state.num_missing_tokens, max(budget, 1))
            num_slots = state.view.num_computed_tokens + num_tokens
            if self._reserve(draft, num_slots):
                budget -= num_tokens
                slices.append((draft, state.catch_up_slice(num_tokens)))
            else:
                draft.tree.stop()
        # A cascade's root may have taken the place of a draft whose slice was there already.
        return [(draft, piece) for draft, piece in slices if draft.state.view is piece.view]

    def num_positions(self, draft: Draft) -> int:
        """Levels that a tree may have before the small model's longest context ends."""
        assert self._runner.max_context is not None
        return self._runner.max_context - len(draft.sequence.token_ids)

    def next_slices(self, growing: SequenceOf[Draft]) -> Slices:
        """The chosen frontiers of these trees."""
        able: list[Draft] = []
        views: list[KVView] = []
        for draft in growing:
            if self.reserve_frontier(draft):
                assert draft.state.view is not None
                able.append(draft)
                views.append(draft.state.view)
        pieces = frontier_slices([draft.tree for draft in able], views)
        if self._token_map is not None:
            for piece in pieces:
                piece.token_ids = self._token_map.ids_to_draft(piece.token_ids)
        return list(zip(able, pieces, strict=True))

    def reserve_frontier(self, draft: Draft) -> bool:
        """Reserve slots for a tree's chosen frontier; where there are none, it grows no further."""
        tree, view = draft.tree, draft.state.view
        assert view is not None
        num_tree_slots = tree.num_slots + tree.num_frontier_rows
        has_room = num_tree_slots <= view.num_tree_slots
        if has_room and self._reserve(draft, tree.root_slot + num_tree_slots):
            return True
        tree.stop()
        return False

    def _reserve(self, draft: Draft, num_slots: int) -> bool:
        """Reserve slots in the small model's cache; drafts never pre-empt a sequence.

        A cascade cannot go on without its root, so the drafts of later arrivals give way to it.
        """
        view = draft.state.view
        assert view is not None
        if draft.needs_root and num_slots <= draft.tree.root_slot + 1:
            needed = view.num_blocks_needed(num_slots)
            if needed > self._runner.pool.num_available:
                self._make_room(draft.sequence, needed)
        try:
            self._runner.copy_blocks(view.reserve(num_slots))
        except OutOfBlocksError:
            return False
        return True

    def receive(self, slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Turn a pass's logits into children of the frontiers; `hidden`: what a head reads."""
        growing: list[Draft] = []
        keep: list[int] = []
        row = 0
        for draft, piece in slices:
            num_rows = piece.num_logit_rows
            # A view may have been reclaimed while the pass was planned.
            if self.has_root(draft):
                growing.append(draft)
                keep.extend(range(row, row + num_rows))
            else:
                draft.tree.stop()
            row += num_rows
        if not growing:
            return
        rows = logits if len(keep) == row else logits[keep]
        if self._token_map is not None:
            rows = self._token_map.logits_to_target(rows)
        self.add_children(growing, rows)

    def first_levels(
        self, slices: Slices, drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> CompiledLevels | None:
        """Return the levels from a draft's first pass on; None where the host has to run that."""
        growers = [draft for draft, _ in slices]
        if not all(draft.may_ask_model for draft in growers):
            return None
        return self._levels(growers, drafts, step, first=[piece for _, piece in slices])

    def later_levels(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> CompiledLevels | None:
        """Return the levels behind a pass; None where the host has to grow them one by one."""
        able = [draft for draft in growers if self.can_grow(draft) and draft.may_ask_model]
        return self._levels(able, drafts, step)

    def _levels(
        self,
        growers: SequenceOf[Draft],
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
        first: SequenceOf[ForwardSlice] = (),
    ) -> CompiledLevels | None:
        if self._token_map is not None:
            return None
        return compiled_levels(
            self, config=self._config, growers=growers, drafts=drafts, step=step, first=first
        )

    def add_children(self, growing: SequenceOf[Draft], logits: Tensor) -> None:
        """Name the frontiers' best children, ranked as the target will rank; logits in order."""
        groups: list[RowGroup] = []
        if not all(takes_greatest(draft.sequence) for draft in growing):
            groups = [
                RowGroup(
                    sequence=draft.sequence,
                    depths=draft.tree.frontier_depths(),
                    paths=draft.tree.frontier_paths,
                )
                for draft in growing
            ]
        best = self._ranked(logits, groups)
        trees = [draft.tree for draft in growing]
        self._keep_logits(trees, logits)
        for draft in growing:
            draft.state.was_asked = draft.may_ask_model
        firsts_new = [tree.num_candidates for tree in trees]
        grow_rows(
            trees,
            best,
            are_asked=[draft.state.was_asked for draft in growing],
            floor=self._config.min_path_prob,
        )
        for draft, first_new in zip(growing, firsts_new, strict=True):
            self._on_new(draft, range(first_new, draft.tree.num_candidates))

    @staticmethod
    def _keep_logits(trees: SequenceOf[DraftTree], logits: Tensor) -> None:
        """Keep the logits of the frontiers for the trees that want them."""
        if not any(tree.keeps_logits for tree in trees):
            return
        first = 0
        for tree in trees:
            last = first + len(tree.frontier)
            if tree.keeps_logits:
                tree.keep_logits(logits[first:last])
            first = last

    def _ranked(self, logits: Tensor, groups: SequenceOf[RowGroup]) -> Likeliest:
        """Each row's best tokens, ranked as the target will rank, with their chances.

        `groups`: of all rows; none where all sequences take the greatest logit.
        """
        rank = scores_with_cut_tokens if has_cut_tokens(groups) else perturbed_scores
        scores = rank(logits, groups)
        # Given the shared noise, the chance that the target agrees follows from a token's lead.
        return likeliest_tokens(scores, min(self._config.max_branching, scores.shape[1]))

    def _likeliest(self, logits: Tensor, groups: SequenceOf[RowGroup]) -> list[LikelyTokens]:
        """Leave out those that are less likely than `min_path_prob`."""
        best = self._ranked(logits, groups)
        floor = self._config.min_path_prob
        return [
            [(token, prob) for token, prob in zip(tokens, probs, strict=True) if prob >= floor]
            for tokens, probs in zip(best.token_ids.tolist(), best.probs.tolist(), strict=True)
        ]
