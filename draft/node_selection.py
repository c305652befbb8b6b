"""Selects what is judged of grown trees: the likeliest guesses of all sequences of a step."""

from collections.abc import Sequence as SequenceOf
from math import inf

from outrider.draft.budget.budget import Floats, StepBudget
from outrider.draft.draft_state import Draft
from outrider.draft.trees.tree_batch import select, weigh
from outrider.verifier.token_tree import TokenTree


def weighted_probs(drafts: SequenceOf[Draft]) -> Floats:
    """Path probabilities of all candidates of all trees, weighted by urgency, descending.

    Notes in each draft how many tokens its guesses should bring.
    """
    probs, sums = weigh([draft.tree for draft in drafts], [draft.urgency for draft in drafts])
    for draft, num_tokens in zip(drafts, sums, strict=True):
        draft.expected_tokens = num_tokens
    return probs


def least_chance(drafts: SequenceOf[Draft], step: StepBudget | None) -> float:
    """The least chance, weighted by urgency, of a guess that the step's budget has room for."""
    if step is None:
        return 0.0
    weighted = weighted_probs(drafts)
    number, _, _ = step.num_nodes(weighted)
    return float(weighted[number - 1]) if number else inf


def select_nodes(drafts: SequenceOf[Draft], floor: float) -> dict[str, TokenTree]:
    """The trees by request id: their guesses whose weighted chance is not below `floor`."""
    trees = [draft.tree for draft in drafts]
    chosen = select(trees, [draft.urgency for draft in drafts], floor=floor)
    return {draft.sequence.request_id: tree for draft, tree in zip(drafts, chosen, strict=True)}
