"""Best-first growth against searching the whole tree of guesses."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.growing_tree import GrowingTree
from engine.block_pool import BlockPool, root_hash
from engine.kv_view import KVView

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


def path_of(tree: GrowingTree, node: int) -> Path:
    path: list[int] = []
    while node:
        path.append(tree.candidates[node].token_id)
        node = tree.candidates[node].parent
    return tuple(reversed(path))


def grow(
    tree: GrowingTree, guesser: Guesser, *, max_frontier: int, min_path_prob: float = 0.0
) -> list[int]:
    """Grow to the end; returns the number of rows of each pass after the root's."""
    tree.grow([guesser.children(())])
    view = make_view()
    rows = []
    while tree.choose_frontier(max_frontier=max_frontier, min_path_prob=min_path_prob):
        piece = tree.frontier_slice(view)
        paths = [path_of(tree, node) for node in tree.frontier]
        assert piece.token_ids == [path[-1] for path in paths]
        assert piece.positions == [tree.root_slot + len(path) for path in paths]
        assert tree.frontier_depths() == [len(path) for path in paths]
        assert tree.frontier_paths() == [list(path) for path in paths]
        rows.append(piece.num_logit_rows)
        tree.grow([guesser.children(path) for path in paths])
        assert len(rows) < 1000, "the tree never stops growing"
    return rows


def make_tree(*, max_nodes: int, max_depth: int, root_slot: int = 20) -> GrowingTree:
    return GrowingTree(
        root_token_id=7, root_slot=root_slot, max_nodes=max_nodes, max_depth=max_depth
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
    found = {path_of(tree, node): prob for prob, node in tree.ranked()}
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
    harvested, offsets = tree.harvest(nodes)
    assert harvested.num_draft_nodes == len(nodes) == len(offsets) - 1
    assert max(harvested.depth) <= max_depth
    assert harvested.parent_index[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(harvested.parent_index) if node)
    siblings = list(zip(harvested.parent_index, harvested.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)
    probs = [prob for prob, _ in ranked]
    assert probs == sorted(probs, reverse=True)


@given(seed=st.integers(0, 1000), max_frontier=st.integers(1, 5))
def test_masks_show_a_node_exactly_its_path(seed: int, max_frontier: int) -> None:
    tree = make_tree(max_nodes=30, max_depth=5)
    grow(tree, Guesser(seed, 3), max_frontier=max_frontier)
    slots = {c.offset: c for c in tree.candidates if c.offset is not None}
    assert sorted(slots) == list(range(tree.num_slots))
    for offset, candidate in slots.items():
        expected, node = 1 << offset, candidate
        while node.parent >= 0:
            node = tree.candidates[node.parent]
            assert node.offset is not None
            assert node.offset < offset  # parents lie in lower slots
            expected |= 1 << node.offset
        assert candidate.mask == expected


def test_offsets_tell_where_the_small_model_computed_a_node() -> None:
    tree = make_tree(max_nodes=8, max_depth=3)
    grow(tree, Guesser(3, 2), max_frontier=2)
    nodes = [node for _, node in tree.ranked()]
    harvested, offsets = tree.harvest(nodes)
    assert offsets[0] == 0
    assert offsets[1:] == [tree.candidates[node].offset for node in nodes]
    assert harvested.token_ids[1:] == [tree.candidates[node].token_id for node in nodes]
    assert None in offsets  # leaves


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
    assert tree.choose_frontier(max_frontier=4, min_path_prob=0.0) == []
    harvested, offsets = tree.harvest([node for _, node in tree.ranked()])
    assert (harvested.token_ids, harvested.parent_index, offsets) == ([7], [-1], [0])


def test_the_widest_and_deepest_tree_fits_the_attention_mask() -> None:
    tree = make_tree(max_nodes=255, max_depth=255)
    rows = grow(tree, Guesser(5, 64), max_frontier=64)
    assert tree.num_slots == 1 + sum(rows) == 256
    assert max(c.mask for c in tree.candidates).bit_length() <= 256
