"""The walk against following one tree by hand."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.trees.verify_tree import ForestPaths, verify_tree
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels

CHOICES = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="there is no triton")),
]


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


class Case:
    """Random trees in flat tensors, and what comes of them by hand."""

    def __init__(
        self, sizes: list[int], *, vocab_size: int, agreement: float, seed: int, padding: int = 0
    ) -> None:
        rng = random.Random(seed)
        token_ids: list[int] = []
        parent_index: list[int] = []
        depth: list[int] = []
        tree_index: list[int] = []
        chosen: list[int] = []
        self.paths: list[list[int]] = []  # of flat nodes, the roots first
        for number, size in enumerate(sizes):
            if not size:
                self.paths.append([])
                continue
            tokens, parents = random_tree(rng, size, vocab_size)
            start = len(token_ids)
            own = [rng.randrange(vocab_size) for _ in tokens]
            for node, parent in enumerate(parents):
                if parent >= 0 and rng.random() < agreement:
                    own[parent] = tokens[node]
            node = size - 1 if agreement == 1.0 else 0  # the path leads to the last node
            while node > 0:
                own[parents[node]], node = tokens[node], parents[node]
            depths = [0] * size
            for node, parent in enumerate(parents):
                depths[node] = 0 if parent < 0 else depths[parent] + 1
            token_ids += tokens
            parent_index += [parent if parent < 0 else parent + start for parent in parents]
            depth += depths
            tree_index += [number] * size
            chosen += own
            self.paths.append([start + node for node in walk(tokens, parents, own)])
        self.max_depth = max(depth, default=0)
        self.num_nodes = len(token_ids)
        for _ in range(padding):
            token_ids.append(0)
            parent_index.append(-1)
            depth.append(0)
            tree_index.append(-1)
            chosen.append(rng.randrange(vocab_size))
        self.chosen, self.token_ids = chosen, token_ids
        self.tensors = [
            torch.tensor(part, dtype=torch.int64)
            for part in (chosen, token_ids, parent_index, depth, tree_index)
        ]

    def run(self, choice: KernelChoice, device: torch.device, *, slack: int) -> ForestPaths:
        torch.use_deterministic_algorithms(choice == "triton")  # what is allocated is poisoned
        try:
            with use_kernels(choice):
                return verify_tree(
                    *(part.to(device) for part in self.tensors),
                    num_trees=len(self.paths),
                    max_depth=self.max_depth + slack,
                )
        finally:
            torch.use_deterministic_algorithms(False)

    def check(self, verdicts: ForestPaths) -> None:
        accepted = verdicts.is_accepted.nonzero().flatten().tolist()
        assert verdicts.is_accepted.dtype == torch.bool
        assert accepted == [node for path in self.paths for node in path]
        assert verdicts.last_node.tolist() == [path[-1] if path else -1 for path in self.paths]
        num_accepted = [max(len(path) - 1, 0) for path in self.paths]
        assert verdicts.num_accepted_tokens.tolist() == num_accepted
        assert verdicts.next_token.tolist() == [
            self.chosen[path[-1]] if path else -1 for path in self.paths
        ]

    def check_paths(self, verdicts: ForestPaths, max_depth: int) -> None:
        for path, found, emitted in zip(
            self.paths,
            verdicts.accepted_path.tolist(),
            verdicts.emitted_tokens.tolist(),
            strict=True,
        ):
            tokens = [self.token_ids[node] for node in path[1:]]
            tokens += [self.chosen[path[-1]]] if path else []
            assert found == path[1:] + [-1] * (max_depth - len(path[1:]))
            assert emitted == tokens + [-1] * (max_depth + 1 - len(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 24), max_size=5),
    agreement=st.sampled_from([0.0, 0.5, 1.0]),
    slack=st.integers(0, 2),
    padding=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_a_forest_has_padding_and_paths(
    device: torch.device,
    choice: str,
    sizes: list[int],
    agreement: float,
    slack: int,
    padding: int,
    seed: int,
) -> None:
    if not any(sizes):
        padding += 1
    case = Case(sizes, vocab_size=7, agreement=agreement, seed=seed, padding=padding)
    paths = case.run(choice, device, slack=slack)
    case.check(paths)
    case.check_paths(paths, case.max_depth + slack)


@pytest.mark.slow_cases
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("sizes", [[256], [3, 256, 1, 250, 256, 256, 256]])
def test_256_nodes_a_tree(device: torch.device, choice: str, sizes: list[int]) -> None:
    case = Case(sizes, vocab_size=9, agreement=1.0, seed=1, padding=5)
    paths = case.run(choice, device, slack=0)
    assert max(len(path) for path in case.paths) > 50
    case.check(paths)
    case.check_paths(paths, case.max_depth)


@pytest.mark.slow_cases
@pytest.mark.parametrize("choice", CHOICES)
def test_a_chain_is_accepted_to_its_end(device: torch.device, choice: KernelChoice) -> None:
    tokens = torch.arange(256, device=device)
    with use_kernels(choice):
        paths = verify_tree(
            tokens + 1, tokens, tokens - 1, tokens, tokens * 0, num_trees=1, max_depth=255
        )
    assert paths.accepted_path.tolist() == [list(range(1, 256))]
    assert paths.emitted_tokens.tolist() == [list(range(1, 257))]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_right_guess_below_a_wrong_one_is_not_accepted(
    device: torch.device, choice: KernelChoice
) -> None:
    # 0 -> 1 (wrong) -> 2 (what the target would choose at 1), and 0 -> 3 (right)
    parts: list[Tensor] = [
        torch.tensor([7, 5, 6, 8]),
        torch.tensor([1, 4, 5, 7]),
        torch.tensor([-1, 0, 1, 0]),
        torch.tensor([0, 1, 2, 1]),
        torch.tensor([0, 0, 0, 0]),
    ]
    with use_kernels(choice):
        verdicts = verify_tree(*(part.to(device) for part in parts), num_trees=1, max_depth=2)
    assert verdicts.is_accepted.tolist() == [True, False, False, True]
    assert verdicts.next_token.tolist() == [8]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_place_without_a_token_ends_the_path(device: torch.device, choice: KernelChoice) -> None:
    # a cascade that cannot say chooses -1; the node below it is not accepted
    parts = ([5, -1, 3], [4, 5, 6], [-1, 0, 1], [0, 1, 2], [0, 0, 0])
    with use_kernels(choice):
        paths = verify_tree(
            *(torch.tensor(part, device=device) for part in parts), num_trees=1, max_depth=2
        )
    assert paths.accepted_path.tolist() == [[1, -1]]
    assert paths.emitted_tokens.tolist() == [[5, -1, -1]]
