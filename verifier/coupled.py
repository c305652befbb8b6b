"""The one acceptance rule: argmax(log target + noise), then follow the child that equals it.

The noise belongs to the position and not to the draft, so the rule is an exact sample for every
tree, and the answer is the same for every tree (Daliri, Musco, Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", 2024). A cascade (verifier/cascade.py)
puts another distribution in the target's place; the walk is the same.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from engine.protocols import Verdict
from engine.sampling import RowGroup, add_noise, log_targets, process_logits
from engine.sequence import Sequence
from engine.token_tree import TokenTree
from kernels.verify_tree import verify_tree
from verifier.cascade import UNDECIDED, cascade_choices


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
        processed = process_logits(logits, groups)
        scores = add_noise(log_targets(processed, groups), groups)
        chosen = by_target = scores.argmax(-1)  # [num_nodes]
        if any(sequence.cascade is not None for sequence in sequences):
            chosen = cascade_choices(by_target, processed, sequences, trees)
            return _with_unratified(trees, _walk(trees, chosen), by_target.tolist())
        if all(tree.num_nodes == 1 for tree in trees):
            return [Verdict(accepted_nodes=[], token_ids=[token]) for token in chosen.tolist()]
        return _walk(trees, chosen)


def _with_unratified(
    trees: SequenceOf[TokenTree], verdicts: SequenceOf[Verdict], by_target: list[int]
) -> list[Verdict]:
    """Verdicts that say which tokens the target alone would not have chosen at their nodes."""
    starts = accumulate((tree.num_nodes for tree in trees), initial=0)
    return [
        replace(
            verdict,
            unratified=[
                token != by_target[start + node]
                for node, token in zip(verdict.nodes, verdict.token_ids, strict=True)
            ],
        )
        for start, verdict in zip(starts, verdicts, strict=False)
    ]


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
        if next_token != UNDECIDED:
            tokens.append(next_token)
        result.append(Verdict(accepted_nodes=path, token_ids=tokens))
    return result
