"""Trees that grow side by side: on the host as `GrowingTree`s, in the kernels as one state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.draft.budget.calibration import (
    BIN_EDGES,
    DEPTH_CLASS,
    LEAST_LIKELY,
    MODEL_SILENT,
    MOST_LIKELY,
    EdgeCalibration,
)
from outrider.draft.trees.growing_tree import GrowingTree
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.kernels.trees import choose_frontier as choosing
from outrider.kernels.trees import select_trees as selecting
from outrider.kernels.trees.choose_frontier import FrontierRows, choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, init_trees
from outrider.kernels.trees.tree_state import TreeState
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT
from tests.sizes import compiled_sizes

VOCAB = 30  # so few that text and the small model often say the same
# Slots that a root has more in the large model's view.
AHEAD = 3
TEXT_BITS = (SOURCE_BIT["suffix"], SOURCE_BIT["prediction"])

MANY = settings(max_examples=40)
# The interpreter takes its time.
FEW = MANY if torch.cuda.is_available() else settings(MANY, max_examples=3)
SHAPES = {
    "seed": st.integers(0, 10_000),
    "num_sequences": st.integers(1, 4),
    "width": st.integers(1, 6),
    "branching": st.integers(1, 5),
}
# In Triton, where a width and a branching are constants.
TRITON_SHAPES = {
    **SHAPES,
    "width": compiled_sizes(range(1, 7), [1, 4]),
    "branching": compiled_sizes(range(1, 6), [3]),
}
# Of the few examples, one has everything.
RICH = {"seed": 12, "num_sequences": 3, "width": 4, "branching": 3}
FLOORS = st.sampled_from([0.0, 0.001, 0.02, 0.1])


@contextmanager
def tree_kernels(kind: KernelChoice) -> Iterator[None]:
    """This kind of kernels; what they do not write shows."""
    if kind == "triton" and triton is None:
        pytest.skip("there is no triton for this system")
    with use_kernels(kind), pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (choosing, "_empty_rows"),
            (selecting, "_empty_ranking"),
            (selecting, "_padding"),
        ):
            patch.setattr(module, name, _poisoned(getattr(module, name)))
        yield


def _poisoned(make: Any) -> Any:
    """Make tensors whose garbage is visible, where they are not filled on purpose."""
    real_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real_empty(*args, **kwargs).fill_(-77)

    def patched(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            return make(*args, **kwargs)

    return patched


def mask_of(words: torch.Tensor) -> int:
    """The bits of one row."""
    unsigned = [word & ((1 << 64) - 1) for word in words.tolist()]
    return sum(word << (64 * place) for place, word in enumerate(unsigned))


def trained_calibration(rng: random.Random) -> EdgeCalibration:
    """One that has seen enough to shift some kinds of guesses, at some depths."""
    calibration = EdgeCalibration()
    for _ in range(12):
        sources = rng.randrange(1, 8) | (MODEL_SILENT if rng.random() < 0.3 else 0)
        depth, is_greedy, bias = rng.randrange(1, 20), rng.random() < 0.5, rng.random()
        for _ in range(40):
            calibration.observe(
                rng.random(),
                rng.random() < bias,
                sources=sources,
                depth=depth,
                is_greedy=is_greedy,
            )
    return calibration


def edge_table(calibration: EdgeCalibration, device: torch.device) -> EdgeTable:
    depth_edges = np.flatnonzero(np.diff(np.array(DEPTH_CLASS))) + 1
    return EdgeTable(
        shifts=torch.from_numpy(calibration.shifts()).to(device),
        bin_edges=torch.tensor(BIN_EDGES, dtype=torch.float32, device=device),
        depth_edges=torch.tensor(depth_edges, dtype=torch.int32, device=device),
        least=LEAST_LIKELY,
        most=MOST_LIKELY,
        model_bit=SOURCE_BIT["model"],
    )


def top_of(rng: random.Random, branching: int) -> tuple[list[int], list[float]]:
    """Different tokens and their chances, which float32 holds exactly, falling."""
    weights = sorted((rng.random() ** 3 for _ in range(branching)), reverse=True)
    total = sum(weights) + rng.random()
    tokens = rng.sample(range(VOCAB), branching)
    return tokens, [float(np.float32(weight / total)) for weight in weights]


def add_text(tree: GrowingTree, rng: random.Random) -> None:
    """A few chains of guesses, some of which share a beginning; perhaps an old answer."""
    if rng.random() < 0.3:
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 4))]
        places = [
            [(token, float(np.float32(rng.uniform(0.2, 0.7)))), ((token + 1) % VOCAB, 0.125)]
            for token in tokens
        ]
        tree.add_answer(tokens, places, min_path_prob=0.01)
    for _ in range(rng.randrange(4)):
        length = rng.randrange(1, 7)
        tree.add_chain(
            rng.choice(TEXT_BITS),
            [rng.randrange(5) for _ in range(length)],
            [float(np.float32(rng.uniform(0.2, 1.0))) for _ in range(length)],
            min_path_prob=0.01,
            is_recalled=rng.random() < 0.3,
        )


@dataclass(kw_only=True)
class Growth:
    """The same trees twice."""

    trees: list[GrowingTree]
    state: TreeState
    table: EdgeTable
    urgencies: list[float]
    width: int
    branching: int
    min_path_prob: float
    rng: random.Random
    is_stepwise: bool = False
    nodes: list[list[int]] = field(default_factory=list)  # of the present frontier

    @classmethod
    def begin(  # noqa: PLR0913
        cls,
        seed: int,
        device: torch.device,
        *,
        num_sequences: int,
        width: int,
        branching: int,
        has_text: bool,
        min_path_prob: float = 0.0,
        capacity: int = 256,
    ) -> "Growth":
        """Begin the trees and expand their roots."""
        rng = random.Random(seed)
        calibration = trained_calibration(rng)
        greedy = [rng.random() < 0.5 for _ in range(num_sequences)]
        urgencies = [rng.choice([0.5, 1.0, 1.7, 4.0]) for _ in greedy]
        trees = [
            GrowingTree(
                root_token_id=rng.randrange(VOCAB),
                root_slot=rng.choice([0, 15, 16, 300]),
                max_nodes=rng.randrange(1, 40),
                max_depth=rng.randrange(1, 8),
                calibrate=calibration.of_requests(is_greedy=is_greedy),
            )
            for is_greedy in greedy
        ]
        for tree in trees if has_text else []:
            add_text(tree, rng)
        state = init_trees(
            [
                InitialTree(
                    candidates=tree.candidates,
                    root_slot=tree.root_slot,
                    target_slot=tree.root_slot + AHEAD,
                    max_nodes=tree.max_nodes,
                    max_depth=tree.max_depth,
                    table=int(is_greedy),
                    urgency=urgency,
                )
                for tree, is_greedy, urgency in zip(trees, greedy, urgencies, strict=True)
            ],
            capacity=capacity,
            width=width,
            recalled_bit=RECALLED_BIT,
            device=device,
        )
        poison(state)
        growth = cls(
            trees=trees,
            state=state,
            table=edge_table(calibration, device),
            urgencies=urgencies,
            width=width,
            branching=branching,
            min_path_prob=min_path_prob,
            rng=rng,
            nodes=[[0]] * num_sequences,
        )
        growth.expand(num_rows=1)
        return growth

    def choose(self) -> FrontierRows:
        """The kernels' choice becomes that of the host's trees too."""
        rows = choose_frontier(
            self.state,
            min_path_prob=self.min_path_prob,
            most_believed=MOST_BELIEVED,
            is_stepwise=self.is_stepwise,
        )
        self.nodes = [[node for node in own if node >= 0] for own in self.state.frontier.tolist()]
        return rows

    def expand(self, num_rows: int | None = None) -> None:
        """Name children of the present frontier, here and there."""
        tokens: list[list[int]] = []
        chances: list[list[float]] = []
        for tree, nodes in zip(self.trees, self.nodes, strict=True):
            children = []
            for place in range(num_rows or self.width):
                own_tokens, own_chances = top_of(self.rng, self.branching)
                tokens.append(own_tokens)
                chances.append(own_chances)
                if place < len(nodes):
                    found = zip(own_tokens, own_chances, strict=True)
                    floor = float(np.float32(self.min_path_prob))
                    children.append([(token, prob) for token, prob in found if prob >= floor])
            tree.frontier = list(nodes)
            tree.grow(children)
        device, shape = self.state.candidates.device, (len(tokens), self.branching)
        expand_tree(
            self.state,
            torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
            torch.tensor(chances, dtype=torch.float32, device=device).view(shape),
            self.table,
            min_path_prob=self.min_path_prob,
        )


def poison(state: TreeState) -> None:
    """Whatever no initial tree has written is rubbish."""
    for sequence, number in enumerate(state.num_candidates.tolist()):
        state.candidates[sequence, :, number:] = -7
        state.ancestor_words[sequence, 1:] = -7


def fields_of(candidates: list[TreeCandidate]) -> dict[str, list[float]]:
    """Return what a state should hold of them."""
    return {
        "token_ids": [candidate.token_id for candidate in candidates],
        "parent": [candidate.parent for candidate in candidates],
        "depth": [candidate.depth for candidate in candidates],
        "sources": [
            candidate.sources | (RECALLED_BIT if candidate.is_recalled else 0)
            for candidate in candidates
        ],
        "evidence": [candidate.evidence for candidate in candidates],
        "is_expanded": [int(candidate.is_expanded) for candidate in candidates],
        "model_confidence": [candidate.model_confidence for candidate in candidates],
        "text_confidence": [candidate.text_confidence for candidate in candidates],
        "confidence": [candidate.confidence for candidate in candidates],
        "edge_prob": [candidate.edge_prob for candidate in candidates],
        "path_prob": [candidate.path_prob for candidate in candidates],
        "covered": [candidate.covered for candidate in candidates],
    }
