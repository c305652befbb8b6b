"""Turns a verdict into what a traced request learns of it."""

from collections.abc import Sequence as SequenceOf
from typing import Final

from outrider.engine.grammar.grammar import GrammarState
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trace import NodeSource, StepTrace, TokenOrigin, TraceNode
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT, TokenTree
from outrider.verifier.verdict import Verdict

# Where several guessed the same token, the first of these names it: what cost no pass comes first.
ORIGINS: Final[tuple[tuple[NodeSource, int], ...]] = (
    ("grammar", SOURCE_BIT["grammar"]),
    ("reused", RECALLED_BIT),
    ("prediction", SOURCE_BIT["prediction"]),
    ("suffix", SOURCE_BIT["suffix"]),
    ("model", SOURCE_BIT["model"]),
    ("head", SOURCE_BIT["head"]),
)


def step_trace(
    sequence: Sequence, tree: TokenTree, verdict: Verdict, emitted: SequenceOf[int]
) -> StepTrace:
    """Trace the sources of a verdict's emitted tokens, and its tree.

    Called before they join the sequence, of whose verdict they are the first ones.
    """
    accepted = verdict.accepted_nodes[: len(emitted)]
    forced = _forced(sequence, emitted)
    origins: list[TokenOrigin] = []
    for place in range(len(emitted)):
        is_small_word = place < len(verdict.unratified) and verdict.unratified[place]
        if forced[place]:
            origins.append("grammar")
        elif sequence.tier == "small" or is_small_word:
            origins.append("small")
        else:
            sources = _sources(tree, accepted[place]) if place < len(accepted) else ()
            origins.append(sources[0] if sources else "target")
    return StepTrace(origins=tuple(origins), nodes=_nodes(tree, accepted))


def _forced(sequence: Sequence, emitted: SequenceOf[int]) -> list[bool]:
    """Return for each emitted token whether the answer's grammar allowed no other."""
    grammar: GrammarState | None = sequence.grammar
    if grammar is None:
        return [False] * len(emitted)
    return [
        grammar.forced_tokens(sequence.token_ids, list(emitted[:place]), 1) == [token_id]
        for place, token_id in enumerate(emitted)
    ]


def _nodes(tree: TokenTree, accepted: SequenceOf[int]) -> tuple[TraceNode, ...]:
    if not tree.num_draft_nodes:
        return ()
    path = {0, *accepted}
    return tuple(
        TraceNode(
            token_id=token_id,
            parent=parent,
            sources=_sources(tree, node),
            is_accepted=node in path,
        )
        for node, (token_id, parent) in enumerate(
            zip(tree.token_ids, tree.parent_index, strict=True)
        )
    )


def _sources(tree: TokenTree, node: int) -> tuple[NodeSource, ...]:
    """Return the sources of a node; none where the tree does not say."""
    bits = tree.sources[node] if tree.sources else 0
    return tuple(source for source, bit in ORIGINS if bits & bit)
