"""A sequence's tree in the compiled library: `outrider.draft.trees.growing_tree` is the reference.

Its guesses lie in the library's memory. After every draft pass, one call asks all trees of a step
at once (`outrider.draft.trees.tree_batch`).
"""

import ctypes
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any, Literal

import numpy as np
from torch import Tensor

from outrider.draft.budget.budget import MOST_BELIEVED, Floats
from outrider.draft.budget.calibration import MODEL_SILENT, RequestCalibration
from outrider.draft.trees.guess_tree import GuessTree
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice
from outrider.engine.sequences.sequence import Rivals
from outrider.kernels.cpu.tree_library import TreeLibrary, TreeStruct
from outrider.kernels.sampling.likeliest import Likeliest
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT, TokenTree

_MASK_BYTES = 8 * MASK_WORDS
_MODEL, _GRAMMAR = SOURCE_BIT["model"], SOURCE_BIT["grammar"]


class CompiledTree(TreeStruct, GuessTree):
    """See `GuessTree`; its fields are those of `TreeStruct`.

    It must not be copied: the guesses' memory is given back with it.
    """

    library: TreeLibrary
    address: int
    kept_logits: dict[int, Tensor]

    @classmethod
    def begin(  # noqa: PLR0913 - all that a tree is begun with
        cls,
        library: TreeLibrary,
        *,
        calibration: RequestCalibration | None,
        root_token_id: int,
        root_slot: int,
        max_nodes: int,
        max_depth: int,
        keeps_logits: bool = False,
        is_stepwise: bool = False,
    ) -> "CompiledTree":
        """Begin with the root; without a calibration, sources are taken at their word.

        Raises ValueError where it may have more nodes than a mask has bits, and MemoryError.
        """
        if max_nodes > MAX_TREE_NODES:
            raise ValueError(f"max_nodes={max_nodes} must be at most {MAX_TREE_NODES}")
        tree = cls.from_buffer_copy(_EMPTY)
        tree.library, tree.address, tree.kept_logits = library, ctypes.addressof(tree), {}
        tree.root_token_id, tree.root_slot = root_token_id, root_slot
        tree.max_nodes, tree.max_depth = max_nodes, max_depth
        tree.keeps_logits, tree.is_stepwise = keeps_logits, is_stepwise
        if calibration is not None:
            tree._calibration = calibration.of  # stays as long as the library reads it
            tree.is_greedy = calibration.is_greedy
            tree.calibration = calibration.of.table_address
        library.begin(tree.address)
        return tree

    def __del__(self) -> None:
        """Give the library's memory back."""
        if self.memory:
            self.library.end(self.address)

    # ---- guesses come in -------------------------------------------------------------------

    def add_chain(
        self,
        source_bit: int,
        token_ids: Iterable[int],
        confidences: Iterable[float],
        node: int = 0,
        *,
        min_path_prob: float = 0.0,
        is_recalled: bool = False,
    ) -> None:
        """Merge a chain of guesses below a node, as far as its path is at least so likely."""
        tokens, chances = array("q", token_ids), array("d", confidences)
        if len(tokens) != len(chances):
            raise ValueError(f"{len(tokens)} tokens, but {len(chances)} confidences")
        self.library.add_chain(
            *(self.address, source_bit, node, len(tokens)),
            *(tokens.buffer_info()[0], chances.buffer_info()[0], min_path_prob, is_recalled),
        )

    def add_answer(
        self, token_ids: Iterable[int], places: Iterable[Rivals], *, min_path_prob: float
    ) -> None:
        """Merge what the small model wrote here before; see `GrowingTree.add_answer`."""
        steps = list(zip(token_ids, places, strict=False))
        tokens = array("q", [token_id for token_id, _ in steps])
        counts = array("q", [len(named) for _, named in steps])
        named = array("q", [token for _, named in steps for token, _ in named])
        chances = array("d", [chance for _, named in steps for _, chance in named])
        failed = self.library.add_answer(
            *(self.address, _MODEL, len(tokens), tokens.buffer_info()[0], counts.buffer_info()[0]),
            *(named.buffer_info()[0], chances.buffer_info()[0], min_path_prob),
        )
        if failed:
            raise KeyError("a token of the answer is not among its own candidates")

    def grow(self, children: list[list[tuple[int, float]]]) -> list[int]:
        """Add the drafting model's children of the frontier; see `GrowingTree.grow`."""
        if len(children) != self.num_frontier:
            raise ValueError(f"children of {len(children)} nodes, not {self.num_frontier}")
        first_new = self.num_candidates
        counts = array("q", [len(found) for found in children])
        tokens = array("q", [token for found in children for token, _ in found])
        chances = array("d", [chance for found in children for _, chance in found])
        self.library.grow(
            *(self.address, counts.buffer_info()[0]),
            *(tokens.buffer_info()[0], chances.buffer_info()[0]),
        )
        return list(range(first_new, self.num_candidates))

    def keep_logits(self, logits: Tensor) -> None:
        """Keep the frontier's logits, [len(frontier), vocab_size]."""
        super().keep_logits(logits)
        for node in self.frontier:
            self.memory[node].has_logits = 1

    # ---- the next level --------------------------------------------------------------------

    def choose_frontier(self, *, max_frontier: int, min_path_prob: float) -> float | None:
        """Pick the nodes at which the drafting model could add most; see `GrowingTree`."""
        ((_, gain),) = choose_frontiers(
            [self], max_frontier=max_frontier, min_path_prob=min_path_prob
        )
        return gain

    def choose_open(self, *, most: int, min_path_prob: float) -> bool:
        """Pick the likeliest nodes whose children are not named yet; False where there are none."""
        self.library.choose_open(self.address, most, min_path_prob)
        return self.num_frontier > 0

    @property
    def frontier(self) -> list[int]:  # type: ignore[override]
        """The candidates whose children are wanted next."""
        return self.frontier_nodes[: self.num_frontier]  # type: ignore[no-any-return]

    @property
    def num_frontier_rows(self) -> int:
        """Rows that the frontier's slice will have, its missing ancestors included."""
        return self.num_ancestors + self.num_frontier

    def frontier_slice(self, view: KVView) -> ForwardSlice:
        """Rows that compute the frontier in the small model; its slots must be reserved."""
        (piece,) = frontier_slices([self], [view])
        return piece

    def stop(self) -> None:
        """Grow no further; what was found so far stays."""
        self.num_frontier = self.num_ancestors = self.max_depth = 0

    # ---- what it has come to ---------------------------------------------------------------

    @property
    def candidates(self) -> list[TreeCandidate]:  # type: ignore[override]
        """A copy of all candidates."""
        copies: list[TreeCandidate] = []
        for node, own in enumerate(self.memory[: self.num_candidates]):
            copies.append(
                TreeCandidate(
                    token_id=own.token_id,
                    parent=own.parent,
                    depth=own.depth,
                    sources=own.sources,
                    model_confidence=own.model_confidence,
                    text_confidence=own.text_confidence,
                    confidence=own.confidence,
                    evidence=own.evidence,
                    edge_prob=own.edge_prob,
                    path_prob=own.path_prob,
                    covered=own.covered,
                    is_expanded=bool(own.is_expanded),
                    is_forced=bool(own.is_forced),
                    is_recalled=bool(own.is_recalled),
                    offset=None if own.offset < 0 else own.offset,
                    mask=int.from_bytes(bytes(own.mask), "little"),
                )
            )
            if node:
                copies[own.parent].children[own.token_id] = node
        return copies

    def ranked(self) -> list[tuple[float, int]]:
        """(path probability, node) of the likeliest guesses, parents before children."""
        self.library.rank(self.address)
        return [(self.memory[node].path_prob, node) for node in self.ranking[: self.num_ranked]]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node; [] for the root."""
        tokens: list[int] = []
        while node > 0:
            candidate = self.memory[node]
            tokens.append(candidate.token_id)
            node = candidate.parent
        return tokens[::-1]

    def frontier_depths(self) -> list[int]:
        """The depth of each frontier node, which decides the token behind it."""
        return [self.memory[node].depth for node in self.frontier]

    def frontier_parents(self) -> list[int]:
        """The candidate above each frontier node."""
        return [self.memory[node].parent for node in self.frontier]

    def depth_and_chance(self, node: int) -> tuple[int, float]:
        """Return a candidate's depth and path probability."""
        candidate = self.memory[node]
        return candidate.depth, candidate.path_prob


_EMPTY = TreeStruct(
    model_bit=_MODEL,
    silent_bit=MODEL_SILENT,
    grammar_bit=_GRAMMAR,
    recalled_bit=RECALLED_BIT,
    most_believed=MOST_BELIEVED,
)


# ---- many trees at once ----------------------------------------------------------------------


def grow_rows(
    trees: SequenceOf[CompiledTree], best: Likeliest, *, are_asked: SequenceOf[bool], floor: float
) -> None:
    """Add the likeliest tokens of rows; see `outrider.draft.trees.tree_batch.grow_rows`."""
    # A GPU's rows come over first: the library reads the host's memory.
    tokens, probs = best.token_ids.cpu().contiguous(), best.probs.cpu().contiguous()
    which, asked = tree_addresses(trees), array("q", are_asked)
    trees[0].library.grow_rows(
        *(which.buffer_info()[0], len(trees), asked.buffer_info()[0], tokens.shape[1]),
        *(tokens.data_ptr(), probs.data_ptr(), floor),
    )


def choose_frontiers(
    trees: SequenceOf[CompiledTree], *, max_frontier: int, min_path_prob: float
) -> list[tuple[int, float | None]]:
    """Choose the next frontiers; see `outrider.draft.trees.tree_batch.choose_frontiers`."""
    which, rows, gains = tree_addresses(trees), _numbers("q", len(trees)), _numbers("d", len(trees))
    trees[0].library.choose(
        *(which.buffer_info()[0], len(trees), max_frontier, min_path_prob),
        *(rows.buffer_info()[0], gains.buffer_info()[0]),
    )
    return [(number, gain if number else None) for number, gain in zip(rows, gains, strict=True)]


def frontier_slices(
    trees: SequenceOf[CompiledTree], views: SequenceOf[KVView]
) -> list[ForwardSlice]:
    """Make the rows of the frontiers; see `outrider.draft.trees.tree_batch.frontier_slices`."""
    num_trees = len(trees)
    num_rows = sum([tree.num_ancestors + tree.num_frontier for tree in trees])
    firsts = [tree.root_slot + tree.num_slots for tree in trees]
    # Counts of trees; then of all rows the tokens, the positions and the masks' first words.
    which, numbers = tree_addresses(trees), _numbers("Q", num_trees + 3 * num_rows)
    words = bytearray(_MASK_BYTES * max(num_rows, 1))
    counts_at = numbers.buffer_info()[0]
    tokens_at, row_bytes = counts_at + 8 * num_trees, 8 * num_rows
    is_narrow = trees[0].library.rows(
        *(which.buffer_info()[0], num_trees, counts_at),
        *(tokens_at, tokens_at + row_bytes, tokens_at + 2 * row_bytes),
        ctypes.addressof(ctypes.c_char.from_buffer(words)),
    )
    if is_narrow < 0:
        raise ValueError("a tree's frontier is its root; choose a frontier before its rows")
    found = numbers.tolist()
    counts, tokens = found[:num_trees], found[num_trees : num_trees + num_rows]
    positions, masks = found[-2 * num_rows : -num_rows], found[-num_rows:]
    if not is_narrow:
        masks = [
            int.from_bytes(words[row * _MASK_BYTES : (row + 1) * _MASK_BYTES], "little")
            for row in range(num_rows)
        ]
    pieces: list[ForwardSlice] = []
    start = 0
    for tree, view, first, count in zip(trees, views, firsts, counts, strict=True):
        end = start + count
        pieces.append(
            ForwardSlice(
                view=view,
                token_ids=tokens[start:end],
                start_slot=first,
                num_logit_rows=tree.num_frontier,
                positions=positions[start:end],
                tree_start=tree.root_slot,
                ancestor_masks=masks[start:end],
            )
        )
        start = end
    return pieces


def weigh(
    trees: SequenceOf[CompiledTree], weights: SequenceOf[float]
) -> tuple[Floats, list[float]]:
    """Weigh what may be accepted; see `outrider.draft.trees.tree_batch.weigh`."""
    probs = np.empty(max(sum([tree.max_nodes for tree in trees]), 1))
    which, sums, own = tree_addresses(trees), _numbers("d", len(trees)), array("d", weights)
    number = trees[0].library.weigh(
        *(which.buffer_info()[0], len(trees), own.buffer_info()[0]),
        *(ctypes.addressof(ctypes.c_char.from_buffer(probs.data)), sums.buffer_info()[0]),
    )
    return probs[:number], sums.tolist()


def select(
    trees: SequenceOf[CompiledTree], weights: SequenceOf[float], *, floor: float
) -> list[TokenTree]:
    """Select what is judged; see `outrider.draft.trees.tree_batch.select`."""
    most = sum([tree.max_nodes + 1 for tree in trees])
    which, own, counts = tree_addresses(trees), array("d", weights), _numbers("q", len(trees))
    numbers = [_numbers("q", most) for _ in range(5)]
    trees[0].library.select(
        *(which.buffer_info()[0], len(trees), own.buffer_info()[0], floor),
        counts.buffer_info()[0],
        *(each.buffer_info()[0] for each in numbers),
    )
    num_nodes = sum(counts)
    tokens, parents, sources, depths, nodes = (each[:num_nodes].tolist() for each in numbers)
    chosen: list[TokenTree] = []
    start = 0
    for tree, count in zip(trees, counts, strict=True):
        end = start + count
        found = TokenTree(
            token_ids=tokens[start:end],
            parent_index=parents[start:end],
            sources=sources[start:end],
            draft_logits=tree.logits_of(nodes[start:end]),
        )
        found.depth = depths[start:end]
        chosen.append(found)
        start = end
    return chosen


def teach(
    trees: SequenceOf[CompiledTree],
    calibrations: SequenceOf[RequestCalibration],
    texts: SequenceOf[list[int]],
) -> None:
    """Let calibrations learn; see `outrider.draft.trees.tree_batch.teach`."""
    which, counts, tokens = tree_addresses(trees), *_flat(texts)
    tables = array("Q", [calibration.of.table_address for calibration in calibrations])
    progress = array("q", (0, 0))
    arguments = (
        *(which.buffer_info()[0], len(trees), tables.buffer_info()[0]),
        *(counts.buffer_info()[0], tokens.buffer_info()[0], progress.buffer_info()[0]),
    )
    while (curve := trees[0].library.learn(*arguments)) >= 0:
        calibrations[progress[0]].of.fit(curve)


def judged(
    trees: SequenceOf[CompiledTree], texts: SequenceOf[list[int]]
) -> list[tuple[int | None, list[int]]]:
    """Say what was right; see `outrider.draft.trees.tree_batch.judged`."""
    which, counts, tokens = tree_addresses(trees), *_flat(texts)
    firsts, offsets = _numbers("q", len(trees)), _numbers("q", len(tokens))
    trees[0].library.judged(
        *(which.buffer_info()[0], len(trees), counts.buffer_info()[0], tokens.buffer_info()[0]),
        *(firsts.buffer_info()[0], offsets.buffer_info()[0]),
    )
    found: list[tuple[int | None, list[int]]] = []
    start, numbers = 0, offsets.tolist()
    for first, count in zip(firsts, counts, strict=True):
        found.append((None if first < 0 else first, numbers[start : start + count]))
        start += count
    return found


def _flat(texts: SequenceOf[list[int]]) -> tuple["array[int]", "array[int]"]:
    """Return the lengths of texts, and their tokens one behind the other."""
    return array("q", map(len, texts)), array("q", chain.from_iterable(texts))


def tree_addresses(trees: SequenceOf[CompiledTree]) -> "array[int]":
    """Return where the trees lie, as the library takes many of them."""
    return array("Q", [tree.address for tree in trees])


def _numbers(kind: Literal["q", "Q", "d"], count: int) -> "array[Any]":
    """Make room for so many integers or real numbers."""
    return array(kind, bytes(8 * count))
