"""Best-first growth against searching the whole tree of guesses."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.trees.compiled_tree import CompiledTree
from outrider.draft.trees.growing_tree import GrowingTree
from outrider.draft.trees.tree_batch import DraftTree
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.kernels.cpu.tree_library import tree_library
from outrider.verifier.token_tree import SOURCE_BIT

Path = tuple[int, ...]


class Guesser:
    """A small model in a table: the children of a path and their edge probabilities."""

    def __init__(self, seed: int, branching: int) -> None:
        self._seed, self._branching = seed, branching

    def children(self, path: Path) -> list[tuple[int, float]]:
        rng = random.Random(f"{self._seed}/{path}")
        weights = [rng.random() ** 3 for _ in range(self._branching + 1)]  # the last one: others
        total = sum(weights)
        tokens = rng.sample(range(100), self._branching)
        found = [(t, w / total) for t, w in zip(tokens, weights, strict=False)]
        return sorted(found, key=lambda child: -child[1])

    def all_paths(self, max_depth: int) -> dict[Path, float]:
        """Every path with its probability."""
        level: dict[Path, float] = {(): 1.0}
        result: dict[Path, float] = {}
        for _ in range(max_depth):
            level = {
                (*path, token): prob * edge
                for path, prob in level.items()
                for token, edge in self.children(path)
            }
            result |= level
        return result


def make_view() -> KVView:
    pool = BlockPool(num_blocks=64, block_size=16)
    return KVView(pool, root=root_hash(""))


def path_of(candidates: list[TreeCandidate], node: int) -> Path:
    path: list[int] = []
    while node:
        path.append(candidates[node].token_id)
        node = candidates[node].parent
    return tuple(reversed(path))


def grow(
    tree: DraftTree, guesser: Guesser, *, max_frontier: int, min_path_prob: float = 0.0
) -> list[int]:
    """Grow to the end; returns the number of rows of each pass after the root's."""
    tree.grow([guesser.children(())])
    view = make_view()
    rows = []
    while tree.choose_frontier(max_frontier=max_frontier, min_path_prob=min_path_prob) is not None:
        piece = tree.frontier_slice(view)
        candidates = tree.candidates
        paths = [path_of(candidates, node) for node in tree.frontier]
        # Ancestors that had to be computed first stand in front of the frontier.
        assert piece.token_ids[-len(paths) :] == [path[-1] for path in paths]
        assert piece.positions is not None
        assert piece.positions[-len(paths) :] == [tree.root_slot + len(path) for path in paths]
        assert piece.num_logit_rows == len(paths)
        assert tree.frontier_depths() == [len(path) for path in paths]
        assert tree.frontier_paths() == [list(path) for path in paths]
        rows.append(piece.num_logit_rows)
        tree.grow([guesser.children(path) for path in paths])
        assert len(rows) < 1000, "the tree never stops growing"
    return rows


def make_tree(*, max_nodes: int, max_depth: int, root_slot: int = 20) -> DraftTree:
    """A tree of the kind that a drafter has here; `test_compiled_tree` compares both kinds."""
    library = tree_library()
    if library is None:
        return GrowingTree(
            root_token_id=7, root_slot=root_slot, max_nodes=max_nodes, max_depth=max_depth
        )
    return CompiledTree.begin(
        library,
        root_token_id=7,
        root_slot=root_slot,
        max_nodes=max_nodes,
        max_depth=max_depth,
        calibration=None,
    )


@given(
    seed=st.integers(0, 10_000),
    branching=st.integers(1, 3),
    max_depth=st.integers(1, 4),
    max_nodes=st.integers(1, 16),
)
def test_an_unhurried_tree_holds_the_likeliest_paths(
    seed: int, branching: int, max_depth: int, max_nodes: int
) -> None:
    # A frontier as wide as a level: each pass computes every node of the next level that matters.
    guesser = Guesser(seed, branching)
    tree = make_tree(max_nodes=max_nodes, max_depth=max_depth)
    grow(tree, guesser, max_frontier=64)
    candidates = tree.candidates
    found = {path_of(candidates, node): prob for prob, node in tree.ranked()}
    best = sorted(guesser.all_paths(max_depth).items(), key=lambda item: -item[1])[:max_nodes]
    assert found == pytest.approx(dict(best))


@given(
    seed=st.integers(0, 10_000),
    branching=st.integers(1, 4),
    max_depth=st.integers(1, 10),
    max_frontier=st.integers(1, 6),
    max_nodes=st.integers(1, 40),
)
def test_growth_is_bounded_and_always_a_tree(
    seed: int, branching: int, max_depth: int, max_frontier: int, max_nodes: int
) -> None:
    tree = make_tree(max_nodes=max_nodes, max_depth=max_depth)
    rows = grow(tree, Guesser(seed, branching), max_frontier=max_frontier)
    assert len(rows) <= max_depth - 1  # a level a pass, the leaves need none
    assert all(count <= max_frontier for count in rows)
    assert tree.num_slots == 1 + sum(rows) <= 256  # fits the attention kernels' masks
    ranked = tree.ranked()
    assert len(ranked) <= max_nodes
    nodes = [node for _, node in ranked]
    chosen = tree.to_token_tree(nodes)
    assert chosen.num_draft_nodes == len(nodes)
    candidates = tree.candidates
    assert [candidates[node].token_id for node in nodes] == chosen.token_ids[1:]
    assert max(chosen.depth) <= max_depth
    assert chosen.parent_index[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(chosen.parent_index) if node)
    siblings = list(zip(chosen.parent_index, chosen.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)
    probs = [prob for prob, _ in ranked]
    assert probs == sorted(probs, reverse=True)


@given(seed=st.integers(0, 1000), max_frontier=st.integers(1, 5))
def test_masks_show_a_node_exactly_its_path(seed: int, max_frontier: int) -> None:
    tree = make_tree(max_nodes=30, max_depth=5)
    grow(tree, Guesser(seed, 3), max_frontier=max_frontier)
    candidates = tree.candidates
    slots = {c.offset: c for c in candidates if c.offset is not None}
    assert sorted(slots) == list(range(tree.num_slots))
    for offset, candidate in slots.items():
        expected, node = 1 << offset, candidate
        while node.parent >= 0:
            node = candidates[node.parent]
            assert node.offset is not None
            assert node.offset < offset  # parents lie in lower slots
            expected |= 1 << node.offset
        assert candidate.mask == expected


def test_a_text_is_followed_as_far_as_it_was_guessed() -> None:
    tree = make_tree(max_nodes=8, max_depth=3)
    grow(tree, Guesser(3, 2), max_frontier=2)
    leaf = max(range(len(tree.candidates)), key=lambda node: tree.candidates[node].depth)
    path = tree.path(leaf)
    nodes = tree.follow([*path, 99, 98])
    assert [tree.candidates[node].token_id for node in nodes] == path
    assert nodes[-1] == leaf
    assert tree.follow([1234, *path]) == []


def test_no_pass_is_spent_on_nodes_that_cannot_get_children() -> None:
    single = make_tree(max_nodes=1, max_depth=5)
    assert grow(single, Guesser(1, 3), max_frontier=4) == []
    flat = make_tree(max_nodes=20, max_depth=1)
    assert grow(flat, Guesser(1, 3), max_frontier=4) == []


def test_unlikely_guesses_are_not_expanded() -> None:
    tree = make_tree(max_nodes=40, max_depth=8)
    grow(tree, Guesser(1, 3), max_frontier=8, min_path_prob=0.2)
    expanded = [c.path_prob for c in tree.candidates if c.offset is not None]
    assert min(expanded) >= 0.2


def test_a_root_without_guesses_is_plain_decoding() -> None:
    tree = make_tree(max_nodes=8, max_depth=3)
    tree.grow([[]])
    assert tree.choose_frontier(max_frontier=4, min_path_prob=0.0) is None
    chosen = tree.to_token_tree([node for _, node in tree.ranked()])
    assert (chosen.token_ids, chosen.parent_index) == ([7], [-1])


def test_the_widest_and_deepest_tree_fits_the_attention_mask() -> None:
    tree = make_tree(max_nodes=255, max_depth=255)
    rows = grow(tree, Guesser(5, 64), max_frontier=64)
    assert tree.num_slots == 1 + sum(rows) == 256
    assert max(c.mask for c in tree.candidates).bit_length() <= 256


# ---- several sources -------------------------------------------------------------------------

MODEL, SUFFIX = SOURCE_BIT["model"], SOURCE_BIT["suffix"]
PREDICTION = SOURCE_BIT["prediction"]


def test_a_token_that_two_sources_guess_is_one_node() -> None:
    tree = make_tree(max_nodes=10, max_depth=4)
    tree.add_chain(SUFFIX, [5, 6, 8], [0.5, 0.5, 0.5])
    tree.add_chain(PREDICTION, [5, 9], [0.8, 0.8])
    new = tree.grow([[(5, 0.6), (4, 0.1)]])
    assert [tree.candidates[node].token_id for node in new] == [4]
    (five,) = tree.follow([5])
    assert tree.candidates[five].sources == SUFFIX | PREDICTION | MODEL
    assert tree.candidates[five].text_confidence == 0.8
    # The odds of two that agree are multiplied.
    assert tree.candidates[five].confidence == pytest.approx(0.48 / (0.48 + 0.08))
    chosen = tree.to_token_tree([node for _, node in tree.ranked()])
    by_path = {
        tuple(path): sources for path, sources in zip(chosen.paths, chosen.sources, strict=True)
    }
    assert by_path == {
        (): 0,
        (5,): SUFFIX | PREDICTION | MODEL,
        (5, 6): SUFFIX,
        (5, 9): PREDICTION,
        (5, 6, 8): SUFFIX,
        (4,): MODEL,
    }


@given(
    chains=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=6),
            st.sampled_from([SUFFIX, PREDICTION]),
        ),
        max_size=8,
    ),
    confidence=st.floats(0.05, 1.0),
    seed=st.integers(0, 100),
)
def test_siblings_share_at_most_certainty_and_paths_multiply(
    chains: list[tuple[list[int], int]], confidence: float, seed: int
) -> None:
    tree = make_tree(max_nodes=255, max_depth=8)
    for tokens, source in chains:
        tree.add_chain(source, tokens, [confidence] * len(tokens))
    grow(tree, Guesser(seed, 3), max_frontier=4)
    candidates = tree.candidates
    for node, candidate in enumerate(candidates):
        children = [candidates[child] for child in candidate.children.values()]
        assert sum(child.edge_prob for child in children) <= 1.0 + 1e-9
        for child in children:
            assert child.path_prob == pytest.approx(candidate.path_prob * child.edge_prob)
            assert child.parent == node
    ranked = [node for _, node in tree.ranked()]
    chosen = tree.to_token_tree(ranked)
    assert all(0 <= parent < node for node, parent in enumerate(chosen.parent_index) if node)


def test_the_model_goes_on_behind_a_text_and_computes_it_on_the_way() -> None:
    tree = make_tree(max_nodes=20, max_depth=8)
    tree.add_chain(SUFFIX, [5, 6, 8], [0.9, 0.9, 0.9])
    tree.grow([[(5, 0.9)]])
    gain = tree.choose_frontier(max_frontier=1, min_path_prob=0.1)
    # The end of the text: nobody has guessed behind it. Model and text agree on how it begins.
    assert gain == pytest.approx(0.81 / 0.82 * 0.9**2)
    assert tree.num_frontier_rows == 3
    piece = tree.frontier_slice(make_view())
    assert (piece.token_ids, piece.num_logit_rows) == ([5, 6, 8], 1)
    assert piece.positions == [21, 22, 23]
    assert piece.ancestor_masks == [0b11, 0b111, 0b1111]
    assert tree.frontier_paths() == [[5, 6, 8]]


def test_forced_tokens_are_not_sent_to_the_model() -> None:
    tree = make_tree(max_nodes=20, max_depth=8)
    tree.grow([[(5, 0.7), (4, 0.2)]])
    (five,) = tree.follow([5])
    tree.add_chain(SOURCE_BIT["grammar"], [6, 7], [1.0, 1.0], five)
    tree.choose_frontier(max_frontier=3, min_path_prob=0.01)
    asked = tree.frontier_paths()
    assert [5, 6, 7] in asked
    assert [4] in asked
    assert [5] not in asked
    assert [5, 6] not in asked


def test_a_cascade_keeps_every_computed_nodes_logits() -> None:
    tree = make_tree(max_nodes=20, max_depth=8)
    tree.keeps_logits = True
    tree.add_chain(SUFFIX, [5, 6], [0.9, 0.9])
    tree.keep_logits(torch.zeros(1, 4))
    tree.grow([[(5, 0.9)]])
    tree.choose_frontier(max_frontier=1, min_path_prob=0.1)
    piece = tree.frontier_slice(make_view())
    assert piece.num_logit_rows == len(piece.token_ids) == 2
    tree.keep_logits(torch.ones(2, 4))
    tree.grow([[], []])
    chosen = tree.to_token_tree([node for _, node in tree.ranked()])
    assert [logits is not None for logits in chosen.draft_logits] == [True, True, True]
