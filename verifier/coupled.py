"""The one acceptance rule: argmax(log target + noise), then follow the child that equals it.

The noise belongs to the position and not to the draft. So for every tree the rule draws an exact
sample, and the same one (Daliri, Musco, Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", 2024). A cascade (verifier/cascade.py) puts another
distribution in the target's place; the walk is the same.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.sampling.judged_trees import judge_by_greatest
from outrider.kernels.sampling.sample import SamplingTable, top_tokens
from outrider.kernels.trees.verify_tree import verify_tree
from outrider.kernels.triton_support import uses_triton
from outrider.kernels.upload import upload_all
from outrider.verifier.cascade import UNDECIDED, cascade_choices
from outrider.verifier.judged import JudgedForest, JudgedSequence
from outrider.verifier.next_tokens import NextRow, NextToken, next_tokens
from outrider.verifier.sampling import (
    RowGroup,
    choose_ruled_tokens,
    choose_tokens,
    mark_not_finite,
    process_logits,
    takes_greatest,
)
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import ForestVerdicts, Verdict


class CoupledVerifier:
    """Judges every tree of a pass with one host synchronisation."""

    def verify(
        self, sequences: SequenceOf[JudgedSequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        """Judge each sequence's tree; logits float32 [total nodes, vocab_size], trees in order."""
        if all(takes_greatest(each) and each.cascade is None for each in sequences):
            judged = judge_by_greatest(
                logits, [tree.token_ids for tree in trees], [tree.parent_index for tree in trees]
            )
            if judged is not None:
                return [
                    Verdict.of(path, [*[tree.token_ids[node] for node in path], next_token])
                    for tree, (path, next_token) in zip(trees, judged, strict=True)
                ]
        groups = [
            RowGroup(sequence=sequence, depths=tree.depth, paths=partial(getattr, tree, "paths"))
            for sequence, tree in zip(sequences, trees, strict=True)
        ]
        if any(sequence.cascade is not None for sequence in sequences):
            processed = process_logits(logits, groups)
            by_target = choose_tokens(processed, groups)  # [num_nodes]
            chosen = cascade_choices(by_target, processed, sequences, trees)
            marked = mark_not_finite(chosen, logits)
            return _walk(trees, chosen.where(chosen == UNDECIDED, marked), by_target)
        chosen = mark_not_finite(choose_ruled_tokens(logits, groups), logits)
        if all(tree.num_nodes == 1 for tree in trees):
            return [Verdict.of([], [token]) for token in chosen.tolist()]
        return _walk(trees, chosen)

    def next_tokens(self, rows: SequenceOf[NextRow], logits: Tensor) -> list[NextToken]:
        """Choose a token for each row; see `outrider.verifier.next_tokens`."""
        return next_tokens(rows, logits)

    def judge_forest(
        self, forest: JudgedForest, logits: Tensor, table: SamplingTable | None = None
    ) -> ForestVerdicts:
        """Apply the same rule to trees on the device; only launched.

        `logits`: float32 [forest.total_rows, vocab_size]; the sequences have no rules and no
        cascade. `table`: how they choose their tokens, where that is not what the forest says.
        """
        rows = (table or forest.sampling).rows(forest.tree_index, forest.depth)
        paths = verify_tree(
            mark_not_finite(top_tokens(logits, rows, 1).token_ids[:, 0], logits),
            forest.token_ids,
            forest.parent_index,
            forest.depth,
            forest.tree_index,
            num_trees=forest.num_trees,
            max_depth=forest.max_depth,
        )
        return ForestVerdicts(
            accepted_path=paths.accepted_path, emitted_tokens=paths.emitted_tokens
        )


def _walk(
    trees: SequenceOf[TokenTree], chosen: Tensor, by_target: Tensor | None = None
) -> list[Verdict]:
    """Accepted paths of all trees.

    `by_target`: what the target alone would have chosen at each node, where the verdicts are to say
    which tokens it did not ratify.
    """
    starts = list(accumulate((tree.num_nodes for tree in trees), initial=0))
    follow = _follow_on_device if uses_triton(chosen) else _follow
    paths, next_tokens, targets = follow(trees, starts, chosen, by_target)
    result = []
    for number, (tree, next_token) in enumerate(zip(trees, next_tokens, strict=True)):
        path = [node - starts[number] for node in paths[number]]
        tokens = [tree.token_ids[node] for node in path]
        if next_token != UNDECIDED:
            tokens.append(next_token)
        verdict = Verdict.of(path, tokens)
        if targets:
            own = targets[starts[number] :]
            nodes = zip(verdict.nodes, verdict.token_ids, strict=True)
            unratified = [token != own[node] for node, token in nodes]
            verdict = replace(verdict, unratified=unratified)
        result.append(verdict)
    return result


# Accepted flat nodes of each tree without its root; next tokens; what `by_target` says.
_Found = tuple[list[list[int]], list[int], list[int]]


def _follow(
    trees: SequenceOf[TokenTree],
    starts: list[int],
    chosen: Tensor,
    by_target: Tensor | None,
) -> _Found:
    """The walk where reading a tensor costs nothing."""
    tokens = chosen.tolist()
    paths, next_tokens = [], []
    for start, tree in zip(starts, trees, strict=False):
        node, wanted, path = 0, tokens[start], []
        token_ids = tree.token_ids
        for child, parent in enumerate(tree.parent_index):  # parents stand before children
            if parent == node and token_ids[child] == wanted:
                node, wanted = child, tokens[start + child]
                path.append(start + child)
        paths.append(path)
        next_tokens.append(tokens[start + node])
    return paths, next_tokens, [] if by_target is None else by_target.tolist()


def _follow_on_device(
    trees: SequenceOf[TokenTree],
    starts: list[int],
    chosen: Tensor,
    by_target: Tensor | None,
) -> _Found:
    """Follow the accepted paths with one copy to the host."""
    flat = [
        [token for tree in trees for token in tree.token_ids],
        [
            parent if parent < 0 else start + parent
            for tree, start in zip(trees, starts, strict=False)
            for parent in tree.parent_index
        ],
        [depth for tree in trees for depth in tree.depth],
        [index for index, tree in enumerate(trees) for _ in tree.token_ids],
    ]  # [4, num_nodes]
    columns = upload_all([np.array(column, dtype=np.int64) for column in flat], chosen.device)
    max_depth = max(max(tree.depth) for tree in trees)
    num_trees = len(trees)
    found = verify_tree(
        chosen,
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        num_trees=num_trees,
        max_depth=max_depth,
    )
    parts = [found.accepted_path.reshape(-1), found.next_token]
    if by_target is not None:
        parts.append(by_target)
    numbers = torch.cat(parts).tolist()
    num_places = num_trees * max_depth
    paths = [
        [node for node in numbers[tree * max_depth : (tree + 1) * max_depth] if node >= 0]
        for tree in range(num_trees)
    ]
    end = num_places + num_trees
    return paths, numbers[num_places:end], numbers[end:]
