"""The one acceptance rule: argmax(log target + noise), then follow the child that equals it.

The noise belongs to the position and not to the draft, so the rule is an exact sample for every
tree, and the answer is the same for every tree (Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", 2024).
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from engine.protocols import Verdict
from engine.sampling import RowGroup, perturbed_scores
from engine.sequence import Sequence
from engine.token_tree import TokenTree
from kernels.verify_tree import verify_tree


class CoupledVerifier:
    """Judges every tree of a pass with one host synchronisation."""

    def verify(
        self, sequences: SequenceOf[Sequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        """One verdict a sequence; logits float32 [total nodes, vocab_size], trees in order."""
        groups = [
            RowGroup(sequence=sequence, depths=tree.depth, paths=partial(getattr, tree, "paths"))
            for sequence, tree in zip(sequences, trees, strict=True)
        ]
        chosen = perturbed_scores(logits, groups).argmax(-1)  # [num_nodes]
        if all(tree.num_nodes == 1 for tree in trees):
            return [Verdict(accepted_nodes=[], token_ids=[token]) for token in chosen.tolist()]
        return _walk(trees, chosen)


def _walk(trees: SequenceOf[TokenTree], chosen: Tensor) -> list[Verdict]:
    """Accepted paths of all trees."""
    starts = list(accumulate((tree.num_nodes for tree in trees), initial=0))
    flat = torch.tensor(
        [
            [token for tree in trees for token in tree.token_ids],
            [
                parent if parent < 0 else start + parent
                for tree, start in zip(trees, starts, strict=False)
                for parent in tree.parent_index
            ],
            [depth for tree in trees for depth in tree.depth],
            [index for index, tree in enumerate(trees) for _ in tree.token_ids],
        ],
        dtype=torch.int64,
        device=chosen.device,
    )  # [4, num_nodes]
    verdicts = verify_tree(
        chosen,
        flat[0],
        flat[1],
        flat[2],
        flat[3],
        num_trees=len(trees),
        max_depth=max(max(tree.depth) for tree in trees),
    )
    accepted = verdicts.is_accepted.tolist()
    next_tokens = verdicts.next_token.tolist()
    result = []
    for tree, start, next_token in zip(trees, starts, next_tokens, strict=False):
        # Parents stand before children, so the accepted nodes stand in path order.
        path = [node for node in range(1, tree.num_nodes) if accepted[start + node]]
        tokens = [tree.token_ids[node] for node in path]
        result.append(Verdict(accepted_nodes=path, token_ids=[*tokens, next_token]))
    return result
