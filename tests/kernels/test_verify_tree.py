"""The walk against following one tree by hand."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.verify_tree import verify_tree


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """(token ids, parent index), siblings differ."""
    tokens, parents = [rng.randrange(vocab_size)], [-1]
    while len(tokens) < num_nodes:
        parent = rng.randrange(max(0, len(tokens) - 4), len(tokens))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [token for token in range(vocab_size) if token not in taken]
        if free:
            tokens.append(rng.choice(free))
            parents.append(parent)
    return tokens, parents


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """The accepted nodes, the root first."""
    path = [0]
    while True:
        here = path[-1]
        matching = [
            node
            for node, parent in enumerate(parents)
            if parent == here and tokens[node] == chosen[here]
        ]
        if not matching:
            return path
        path.append(matching[0])


@given(
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    vocab_size=st.integers(6, 9),
    agreement=st.sampled_from([0.0, 0.5, 0.95]),
    slack=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_equals_following_each_tree_alone(
    sizes: list[int], vocab_size: int, agreement: float, slack: int, seed: int
) -> None:
    rng = random.Random(seed)
    token_ids, parent_index, depth, tree_index, chosen = [], [], [], [], []
    expected = []
    for number, size in enumerate(sizes):
        tokens, parents = random_tree(rng, size, vocab_size)
        start = len(token_ids)
        own = [rng.randrange(vocab_size) for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0 and rng.random() < agreement:
                own[parent] = tokens[node]
        depths = [0] * size
        for node, parent in enumerate(parents):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
        token_ids += tokens
        parent_index += [parent if parent < 0 else parent + start for parent in parents]
        depth += depths
        tree_index += [number] * size
        chosen += own
        expected.append([start + node for node in walk(tokens, parents, own)])
    verdicts = verify_tree(
        *(torch.tensor(part) for part in (chosen, token_ids, parent_index, depth, tree_index)),
        num_trees=len(sizes),
        max_depth=max(depth) + slack,
    )
    assert verdicts.is_accepted.nonzero().flatten().tolist() == [n for p in expected for n in p]
    assert verdicts.last_node.tolist() == [path[-1] for path in expected]
    assert verdicts.num_accepted_tokens.tolist() == [len(path) - 1 for path in expected]
    assert verdicts.next_token.tolist() == [chosen[path[-1]] for path in expected]


def test_a_right_guess_below_a_wrong_one_is_not_accepted() -> None:
    # 0 -> 1 (wrong) -> 2 (what the target would choose at 1), and 0 -> 3 (right)
    verdicts = verify_tree(
        torch.tensor([7, 5, 6, 8]),
        torch.tensor([1, 4, 5, 7]),
        torch.tensor([-1, 0, 1, 0]),
        torch.tensor([0, 1, 2, 1]),
        torch.tensor([0, 0, 0, 0]),
        num_trees=1,
        max_depth=2,
    )
    assert verdicts.is_accepted.tolist() == [True, False, False, True]
    assert verdicts.next_token.tolist() == [8]
