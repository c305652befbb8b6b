"""From grown trees to what is judged: the likeliest guesses of all sequences of a step."""

from collections.abc import Sequence as SequenceOf
from math import inf

import numpy as np

from draft.budget import Floats, StepBudget
from draft.draft_state import Draft
from engine.trees.token_tree import TokenTree


def weighted_probs(drafts: SequenceOf[Draft]) -> Floats:
    """Path probabilities of all candidates of all trees, weighted by urgency, descending."""
    probs = [draft.urgency * prob for draft in drafts for prob, _ in draft.tree.verifiable()]
    if len(drafts) > 1:  # a tree's own are ranked already
        probs.sort(reverse=True)
    return np.array(probs)


def least_chance(drafts: SequenceOf[Draft], step: StepBudget | None, *, spent_s: float) -> float:
    """The least chance, weighted by urgency, of a guess that the step's budget has room for.

    spent_s: of the draft passes that were made for these trees.
    """
    if step is None:
        return 0.0
    weighted = weighted_probs(drafts)
    number, _, _ = step.num_nodes(weighted, spent_s=spent_s)
    return float(weighted[number - 1]) if number else inf


def select_nodes(drafts: SequenceOf[Draft], floor: float) -> dict[str, TokenTree]:
    """The trees by request id: their guesses whose weighted chance is not below `floor`.

    Each tree's part is the head of its own ranking, in which parents stand before children.
    """
    return {
        draft.sequence.request_id: draft.tree.to_token_tree(
            [node for prob, node in draft.tree.verifiable() if prob * draft.urgency >= floor]
        )
        for draft in drafts
    }
