"""Drawing tokens and growing trees: kernels after the models, for bench_kernels."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.gpu.gpu_kernel_cases import Case, Cases
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.kernels.sampling.sample import SamplingRows, top_tokens
from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, init_trees
from outrider.kernels.trees.select_trees import select_trees
from outrider.kernels.trees.tree_state import TreeState
from outrider.kernels.trees.verify_tree import verify_tree
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT

MODEL_BIT = SOURCE_BIT["model"]
BRANCHING = 3
WIDTH = 4  # frontier nodes of a level
CAPACITY = 256
LEVELS = 4
TREE_NODES = 64

# ---- tokens


def sampling_rows(cases: Cases, rows: int, *, temperature: float, truncates: bool) -> SamplingRows:
    """The same parameters in every row."""

    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device=cases.device)

    return SamplingRows(
        temperature=full(temperature),
        top_k=torch.full((rows,), 50 if truncates else 0, dtype=torch.int32, device=cases.device),
        top_p=full(0.95 if truncates else 1.0),
        min_p=full(0.02 if truncates else 0.0),
        noise_keys=torch.randint(
            -(1 << 31), 1 << 31, (rows, 2), dtype=torch.int32, device=cases.device
        ),
        has_sampled=temperature > 0,
        has_truncation=truncates,
    )


def tokens(cases: Cases) -> list[Case]:
    """Drawing: logits are read once; with truncation more than once, so its share is lower."""
    kinds = {
        "greedy": (0.0, False, 1, False),
        "drafter's 3 with totals": (0.8, False, 3, True),
        "sampled": (0.8, False, 1, False),
        "sampled, top-k, top-p, min-p": (0.8, True, 1, False),
    }

    def make(rows: int, kind: str) -> Callable[[], object]:
        temperature, truncates, number, with_probs = kinds[kind]
        logits = 3.0 * torch.randn(rows, cases.shape.vocab_size, device=cases.device)
        parameters = sampling_rows(cases, rows, temperature=temperature, truncates=truncates)
        return partial(top_tokens, logits, parameters, number, with_probs=with_probs)

    return [
        Case(
            name=f"top_tokens, {kind}, {rows} rows",
            make=partial(make, rows, kind),
            num_bytes=rows * cases.shape.vocab_size * 4,
        )
        for rows in cases.rows[:2]
        for kind in kinds
    ]


# ---- trees


def verification(cases: Cases) -> list[Case]:
    """The walk: a few kilobytes, so launching is all that counts."""

    def make(num_trees: int, nodes: int) -> Callable[[], object]:
        parents = torch.full((num_trees, nodes), -1, device=cases.device)
        index = torch.arange(nodes, device=cases.device)
        first = torch.arange(num_trees, device=cases.device)[:, None] * nodes
        parents[:, 1:] = (index[1:] - 1) // 2 + first  # binary trees
        depth = (index + 1).log2().floor().long().expand(num_trees, -1)
        return partial(
            verify_tree,
            cases.integers(2, num_trees * nodes),
            (index % 2).repeat(num_trees),  # siblings differ
            parents.flatten(),
            depth.flatten().contiguous(),
            (first // nodes).expand(-1, nodes).flatten().contiguous(),
            num_trees=num_trees,
            max_depth=8,
        )

    return [
        Case(
            name=f"verify_tree, {trees} trees of {TREE_NODES}",
            make=partial(make, trees, TREE_NODES),
            num_bytes=trees * TREE_NODES * 5 * 8,
        )
        for trees in cases.trees
    ]


def initial_trees(cases: Cases, num_trees: int) -> TreeState:
    """Trees with nothing but a root."""
    root = SimpleNamespace(
        token_id=1,
        parent=-1,
        depth=0,
        sources=0,
        evidence=0,
        is_expanded=False,
        is_recalled=False,
        model_confidence=1.0,
        text_confidence=1.0,
        confidence=1.0,
        edge_prob=1.0,
        path_prob=1.0,
        covered=0.0,
    )
    tree = InitialTree(candidates=[root], root_slot=100, max_nodes=64, max_depth=16)
    return init_trees(
        [tree] * num_trees,
        capacity=CAPACITY,
        width=WIDTH,
        recalled_bit=RECALLED_BIT,
        device=cases.device,
    )


def edge_table(cases: Cases) -> EdgeTable:
    """A calibration that shifts nothing, of the drafter's sizes."""
    shifts = torch.from_numpy(EdgeCalibration().shifts()).to(cases.device)
    _, _, num_depths, num_bins = shifts.shape
    return EdgeTable(
        shifts=shifts,
        bin_edges=torch.linspace(0.0, 1.0, num_bins + 1, device=cases.device)[1:-1].contiguous(),
        depth_edges=torch.arange(1, num_depths, dtype=torch.int32, device=cases.device),
        least=0.001,
        most=0.999,
        model_bit=MODEL_BIT,
    )


def growing(cases: Cases) -> list[Case]:
    """Trees from their root on (four small copies put it back), and the choice at the end."""
    table = edge_table(cases)

    def levels(num_trees: int) -> Callable[[], TreeState]:
        fresh, state = initial_trees(cases, num_trees), initial_trees(cases, num_trees)
        changed = ("candidates", "numbers", "ancestor_words", "frontier")
        pairs = [(getattr(state, name), getattr(fresh, name)) for name in changed]
        rows = num_trees * WIDTH
        guesses = [
            (
                cases.distinct(1000, rows * BRANCHING).view(rows, BRANCHING),
                torch.rand(rows, BRANCHING, device=cases.device) * 0.3 + 0.05,
            )
            for _ in range(LEVELS)
        ]

        def grow() -> TreeState:
            for old, new in pairs:
                old.copy_(new)
            for token_ids, probs in guesses:
                expand_tree(state, token_ids, probs, table, min_path_prob=0.001)
                choose_frontier(state, min_path_prob=0.001, most_believed=0.7)
            return state

        return grow

    def selection(num_trees: int) -> Callable[[], object]:
        state = levels(num_trees)()
        return partial(select_trees, state, num_nodes=64, caps=[64] * num_trees)

    state_bytes = 13 * 4 * CAPACITY
    return [
        case
        for trees in cases.trees
        for case in (
            Case(
                name=f"{LEVELS} levels of expand_tree and choose_frontier, {trees} trees",
                make=partial(levels, trees),
                num_bytes=2 * LEVELS * trees * state_bytes,
            ),
            Case(
                name=f"select_trees, {trees} trees",
                make=partial(selection, trees),
                num_bytes=2 * trees * state_bytes,
                has_host_part=True,
            ),
        )
    ]
