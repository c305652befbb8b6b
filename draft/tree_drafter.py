"""The small model as a drafter of token trees."""

from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from torch import Tensor

from draft.budget import AcceptanceEstimate, TreeBudget
from draft.config import DraftConfig
from draft.growing_tree import GrowingTree
from engine.block_pool import OutOfBlocksError
from engine.kv_view import KVView
from engine.protocols import Proposal, Verdict
from engine.runner import ForwardSlice, ModelRunner
from engine.sampling import RowGroup, perturbed_scores
from engine.sequence import Sequence
from engine.token_tree import TokenTree


@dataclass(eq=False, slots=True, kw_only=True)
class _DraftState:
    """What is kept for a sequence between steps: its hold on the small model's cache.

    view: None after its blocks were reclaimed. tree: while a proposal runs. offsets: draft offset
    of each node of the tree under judgement, which began at `root_slot`.
    """

    view: KVView | None
    tree: GrowingTree | None = None
    offsets: list[int | None] = field(default_factory=list)
    root_slot: int = 0
    partial_tokens: int = 0  # a catch-up chunk in flight that does not reach the root


class TreeDrafter:
    """Drafts with the small model that also answers: same weights, same passes, own KV views.

    A view that has fallen behind (drafting was off, or guesses were accepted that the small model
    never computed) catches up in the first pass of a proposal.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        config: DraftConfig | None = None,
        budget: TreeBudget | None = None,
    ) -> None:
        self._runner = runner
        self._config = config or DraftConfig()
        self._budget = budget
        self._states: dict[str, _DraftState] = {}
        self._acceptance = AcceptanceEstimate()

    # ---- the engine's protocol ------------------------------------------------------------

    def propose(self, sequences: SequenceOf[Sequence]) -> Proposal:
        """Draft one tree for each sequence; see `engine.protocols.Drafter`."""
        chains = {s.request_id: _proposal_chain(s, self._limits(s)[0]) for s in sequences}
        growers = []
        if self._is_worth_drafting(len(sequences)):
            for sequence in sequences:
                may_grow = min(self._limits(sequence)) > 0 and self._can_read(sequence)
                if chains[sequence.request_id] is None and may_grow:
                    growers.append(sequence)
                    self._plant(sequence)
        spent_s = yield from self._grow(growers, len(sequences))
        trees = self._harvest(growers, len(sequences), spent_s)
        return [
            trees.get(sequence.request_id)
            or chains[sequence.request_id]
            or TokenTree.root_only(sequence.token_ids[-1])
            for sequence in sequences
        ]

    def commit(self, sequence: Sequence, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Keep the accepted path in the draft view; see `engine.protocols.Drafter`."""
        state = self._states.get(sequence.request_id)
        if state is None or not state.offsets:
            return [], []
        offsets, state.offsets = state.offsets, []
        if len(offsets) > 1:
            self._acceptance.observe(bool(verdict.accepted_nodes))
        view = state.view
        if view is None:
            return [], []
        sources, destinations = [], []
        num_valid = 1  # the root
        for node in verdict.accepted_nodes:
            offset = offsets[node]
            if offset is None:  # a leaf that the small model never computed
                break
            if offset != num_valid:
                sources.append(view.slot(state.root_slot + offset))
                destinations.append(view.slot(state.root_slot + num_valid))
            num_valid += 1
        # Published with the next catch-up, when the sequence has these tokens.
        view.num_computed_tokens = state.root_slot + num_valid
        view.trim()
        return sources, destinations

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        """Draft on from an existing small view."""
        self._states[sequence.request_id] = _DraftState(view=view)

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's draft view."""
        state = self._states.pop(sequence.request_id, None)
        if state is not None and state.view is not None:
            state.view.release()

    def reclaim(self, num_blocks: int) -> None:
        """Give back draft views, the latest first, until `num_blocks` blocks are free again."""
        pool = self._runner.pool
        wanted = pool.num_available + num_blocks
        for state in reversed(self._states.values()):
            if pool.num_available >= wanted:
                return
            if state.view is not None:
                state.view.release()
                state.view = None
                state.tree = None

    # ---- a proposal -----------------------------------------------------------------------

    def _limits(self, sequence: Sequence) -> tuple[int, int]:
        """(nodes, depth) that the sequence's tree may have."""
        own, config = sequence.request.speculation, self._config
        nodes, depth = config.max_draft_nodes, config.max_draft_depth
        if own.max_draft_nodes is not None:
            nodes = min(nodes, own.max_draft_nodes)
        if own.max_draft_depth is not None:
            depth = min(depth, own.max_draft_depth)
        # The last token of an answer comes from the target itself, and the small model's context
        # may be the shorter one.
        assert self._runner.max_context is not None
        num_positions = self._runner.max_context - len(sequence.token_ids)
        return nodes, min(depth, sequence.num_remaining_tokens - 1, num_positions)

    def _can_read(self, sequence: Sequence) -> bool:
        """Whether the small model knows every token it has to catch up with.

        Models of a family share a tokenizer, but pad their vocabularies differently.
        """
        state = self._states.get(sequence.request_id)
        start = 0 if state is None or state.view is None else state.view.num_computed_tokens
        return max(sequence.token_ids[start:]) < self._runner.vocab_size

    def _is_worth_drafting(self, num_sequences: int) -> bool:
        if self._budget is None:
            return True
        is_worth_it = self._budget.is_worth_drafting(
            num_sequences, self._acceptance.value, self._config.max_draft_depth
        )
        if not is_worth_it:
            self._acceptance.forget()
        return is_worth_it

    def _plant(self, sequence: Sequence) -> None:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = _DraftState(view=None)
        if state.view is None:
            state.view = self._runner.new_view(sequence.request.cache_salt)
            state.view.match_prefix(sequence.token_ids)
        max_nodes, max_depth = self._limits(sequence)
        state.root_slot = len(sequence.token_ids) - 1
        state.tree = GrowingTree(
            root_token_id=sequence.token_ids[-1],
            root_slot=state.root_slot,
            max_nodes=max_nodes,
            max_depth=max_depth,
        )

    def _grow(
        self, growers: SequenceOf[Sequence], num_sequences: int
    ) -> Generator[list[ForwardSlice], Tensor, float]:
        """Run draft passes while one is worth its time; returns their expected seconds."""
        spent_s = 0.0
        slices: dict[str, ForwardSlice] = {}
        for sequence in growers:
            piece = self._catch_up(sequence)
            if piece is not None:
                slices[sequence.request_id] = piece
        while slices:
            num_rows = sum(len(piece.token_ids) for piece in slices.values())
            if self._budget is not None:
                spent_s += self._budget.draft_pass_s(num_rows)
            logits = yield list(slices.values())
            expanded = [s for s in growers if s.request_id in slices]
            self._receive(expanded, slices, logits)
            slices = self._next_slices(growers, num_sequences, spent_s)
        return spent_s

    def _catch_up(self, sequence: Sequence) -> ForwardSlice | None:
        """The first slice: all tokens that the small model lacks, the root last."""
        state = self._states[sequence.request_id]
        view = state.view
        if view is None:
            return None
        start = view.num_computed_tokens
        end = min(len(sequence.token_ids), start + self._config.max_catch_up_tokens)
        if not self._reserve(state, end):
            return None
        is_complete = end == len(sequence.token_ids)
        state.partial_tokens = 0 if is_complete else end
        return ForwardSlice(
            view=view,
            token_ids=sequence.token_ids[start:end],
            start_slot=start,
            num_logit_rows=int(is_complete),
        )

    def _reserve(self, state: _DraftState, num_slots: int) -> bool:
        """Make room in the small cache, or stop drafting: guesses never push anybody out."""
        assert state.view is not None
        try:
            self._runner.copy_blocks(state.view.reserve(num_slots))
        except OutOfBlocksError:
            state.tree = None
            return False
        return True

    def _receive(
        self, expanded: SequenceOf[Sequence], slices: Mapping[str, ForwardSlice], logits: Tensor
    ) -> None:
        """Turn a pass's logits into children of the frontiers."""
        growing: list[tuple[Sequence, GrowingTree]] = []
        keep: list[int] = []
        row = 0
        for sequence in expanded:
            state = self._states[sequence.request_id]
            num_rows = slices[sequence.request_id].num_logit_rows
            if state.view is None or state.tree is None:  # reclaimed while the pass was planned
                pass
            elif state.partial_tokens:
                state.view.advance(state.partial_tokens, sequence.token_ids)
                state.tree = None
            else:
                if state.view.num_computed_tokens <= state.root_slot:
                    state.view.advance(state.root_slot + 1, sequence.token_ids)
                growing.append((sequence, state.tree))
                keep.extend(range(row, row + num_rows))
            row += num_rows
        if not growing:
            return
        rows = logits if len(keep) == row else logits[keep]
        children = self._children(growing, rows)
        first = 0
        for _, tree in growing:
            last = first + len(tree.frontier)
            tree.grow(children[first:last])
            first = last

    def _children(
        self, growing: SequenceOf[tuple[Sequence, GrowingTree]], logits: Tensor
    ) -> list[list[tuple[int, float]]]:
        """Per row the best (token id, edge probability), ranked as the target will rank."""
        groups = [
            RowGroup(sequence=sequence, depths=tree.frontier_depths(), paths=tree.frontier_paths)
            for sequence, tree in growing
        ]
        scores = perturbed_scores(logits, groups)
        # Given the shared noise, the chance that the target agrees follows from a token's lead.
        best = scores.softmax(-1).topk(min(self._config.max_branching, scores.shape[1]))
        floor = self._config.min_path_prob
        return [
            [(token, prob) for token, prob in zip(tokens, probs, strict=True) if prob >= floor]
            for tokens, probs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _next_slices(
        self, growers: SequenceOf[Sequence], num_sequences: int, spent_s: float
    ) -> dict[str, ForwardSlice]:
        """The next level of every tree that is worth one."""
        config = self._config
        growing: list[tuple[str, _DraftState, GrowingTree]] = []
        gained, num_rows = 0.0, 0
        for sequence in growers:
            state = self._states[sequence.request_id]
            if state.tree is None or state.view is None:
                continue
            path_probs = state.tree.choose_frontier(
                max_frontier=config.max_frontier, min_path_prob=config.min_path_prob
            )
            if path_probs:
                gained += sum(path_probs) * self._acceptance.value
                num_rows += len(path_probs)
                growing.append((sequence.request_id, state, state.tree))
        if not growing or not self._is_worth_a_pass(
            growers, num_sequences, spent_s, gained, num_rows
        ):
            return {}
        slices = {}
        for request_id, state, tree in growing:
            assert state.view is not None
            num_slots = state.root_slot + tree.num_slots + len(tree.frontier)
            try:
                self._runner.copy_blocks(state.view.reserve(num_slots))
            except OutOfBlocksError:
                tree.frontier = []
                tree.max_depth = 0  # what was found so far is still offered
                continue
            slices[request_id] = tree.frontier_slice(state.view)
        return slices

    def _is_worth_a_pass(
        self,
        growers: SequenceOf[Sequence],
        num_sequences: int,
        spent_s: float,
        gained: float,
        num_rows: int,
    ) -> bool:
        if self._budget is None:
            return True
        _, expected, step_s = self._budget.num_nodes(
            self._ranked_probs(growers), num_sequences=num_sequences, spent_s=spent_s
        )
        return self._budget.is_worth_a_pass(
            tokens_gained=gained, num_rows=num_rows, expected_tokens=expected, step_s=step_s
        )

    def _ranked_probs(self, growers: SequenceOf[Sequence]) -> list[float]:
        """Path probabilities of all candidates of all trees, descending."""
        probs: list[float] = []
        for sequence in growers:
            tree = self._states[sequence.request_id].tree
            if tree is not None:
                probs.extend(path_prob for path_prob, _ in tree.ranked())
        probs.sort(reverse=True)
        return probs

    def _harvest(
        self, growers: SequenceOf[Sequence], num_sequences: int, spent_s: float
    ) -> dict[str, TokenTree]:
        """Share the step's nodes out over all trees: the likeliest ones, wherever they are."""
        ranked: list[tuple[float, int, int]] = []
        for index, sequence in enumerate(growers):
            tree = self._states[sequence.request_id].tree
            if tree is not None:
                ranked.extend((-prob, index, node) for prob, node in tree.ranked())
        ranked.sort(key=lambda item: item[0])  # stable: parents stay before children
        num_nodes = len(ranked)
        if self._budget is not None:
            num_nodes, _, _ = self._budget.num_nodes(
                [-negative for negative, _, _ in ranked],
                num_sequences=num_sequences,
                spent_s=spent_s,
            )
        nodes: list[list[int]] = [[] for _ in growers]
        for _, index, node in ranked[:num_nodes]:
            nodes[index].append(node)
        trees = {}
        for sequence, chosen in zip(growers, nodes, strict=True):
            state = self._states[sequence.request_id]
            if state.tree is not None:
                trees[sequence.request_id], state.offsets = state.tree.harvest(chosen)
                state.tree = None
        return trees


def _proposal_chain(sequence: Sequence, max_nodes: int) -> TokenTree | None:
    """The next tokens of an earlier answer, while this one agrees with it."""
    proposal = sequence.proposal_token_ids
    num_output = sequence.num_output_tokens
    if not proposal:
        return None
    length = min(max_nodes, sequence.num_remaining_tokens - 1)
    ahead = proposal[num_output : num_output + length]
    if not ahead or sequence.output_token_ids != proposal[:num_output]:
        return None
    return TokenTree(
        token_ids=[sequence.token_ids[-1], *ahead], parent_index=list(range(-1, len(ahead)))
    )
