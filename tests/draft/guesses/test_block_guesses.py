"""The tree of products is the best-first one, against searching all products."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.guesses.block_guesses import grow_products
from outrider.draft.guesses.model_guesses import LikelyTokens
from outrider.draft.trees.growing_tree import GrowingTree
from outrider.verifier.token_tree import SOURCE_BIT

Path = tuple[int, ...]


@st.composite
def children_by_depth(draw: st.DrawFn) -> list[LikelyTokens]:
    """Up to 5 depths of up to 4 tokens; together at most 1 at a depth."""
    depths = []
    for _ in range(draw(st.integers(1, 5))):
        parts = draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
        whole = sum(parts) + draw(st.integers(0, 30))
        depths.append([(token, part / whole) for token, part in enumerate(parts)])
    return depths


def all_products(children: list[LikelyTokens]) -> dict[Path, float]:
    found: dict[Path, float] = {}
    for depth in range(1, len(children) + 1):
        for named in product(*children[:depth]):
            chance = 1.0
            for _, edge in named:
                chance *= edge
            found[tuple(token for token, _ in named)] = chance
    return found


def tree_of(num_depths: int, max_nodes: int) -> GrowingTree:
    tree = GrowingTree(root_token_id=9, root_slot=4, max_nodes=max_nodes, max_depth=num_depths)
    tree.model_bit = SOURCE_BIT["head"]
    return tree


@given(children_by_depth(), st.integers(1, 40), st.sampled_from((0.0, 0.02, 0.2)))
def test_best_first(children: list[LikelyTokens], max_nodes: int, floor: float) -> None:
    tree = tree_of(len(children), max_nodes)
    likely = [[each for each in named if each[1] >= floor] for named in children]
    grow_products(tree, likely, min_path_prob=floor)
    found = [(tuple(tree.path(node)), prob) for prob, node in tree.ranked() if prob >= floor]
    wanted = {path: prob for path, prob in all_products(children).items() if prob >= floor}
    best = sorted(wanted.values(), reverse=True)[:max_nodes]
    assert len(set(found)) == len(found)
    for (path, prob), other in zip(found, best, strict=True):
        assert abs(prob - wanted[path]) < 1e-9
        assert abs(prob - other) < 1e-9


@given(children_by_depth(), st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_merged_with_text(children: list[LikelyTokens], text: list[int]) -> None:
    """A chain of text has the block's candidates beside every token of it that is likely."""
    tree = tree_of(len(children), 40)
    tree.add_chain(SOURCE_BIT["suffix"], text, [0.9] * len(text))
    grow_products(tree, children, min_path_prob=0.0)
    places = [0, *tree.follow(text)]
    assert len(places) == len(text) + 1
    kept = {0} | {node for _, node in tree.ranked()[: tree.max_nodes - 1]}
    for depth, node in enumerate(places[:-1]):
        candidate = tree.candidates[node]
        can_be = depth < len(children)
        assert candidate.is_expanded <= can_be
        assert candidate.is_expanded or not can_be or node not in kept
        if candidate.is_expanded:
            wanted = {token for token, _ in children[depth]} | {text[depth]}
            assert set(candidate.children) == wanted
            assert sum(tree.candidates[c].edge_prob for c in candidate.children.values()) < 1.001
