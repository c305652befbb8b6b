"""Counts of verified and accepted guesses, by depth and by source."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.verifier.params import SOURCES, Source
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT, TokenTree


@dataclass(slots=True)
class SpeculationCounts:
    """Cumulative counts; index 0 of the lists is depth 1.

    A node that several sources guessed counts for each of them.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    _drafted: dict[Source, list[int]] = field(default_factory=lambda: {s: [] for s in SOURCES})
    _accepted: dict[Source, list[int]] = field(default_factory=lambda: {s: [] for s in SOURCES})

    def count(self, tree: TokenTree, accepted_nodes: list[int]) -> None:
        """Add one verified tree; one that names no sources is left out by source."""
        if not tree.num_draft_nodes:
            return
        self.num_drafts += 1
        self.num_draft_tokens += tree.num_draft_nodes
        self.num_accepted_tokens += len(accepted_nodes)
        missing = len(accepted_nodes) - len(self.accepted_per_depth)
        self.accepted_per_depth.extend([0] * missing)
        for depth in range(len(accepted_nodes)):
            self.accepted_per_depth[depth] += 1
        if tree.sources:
            _add(self._drafted, tree, range(1, tree.num_nodes))
            _add(self._accepted, tree, accepted_nodes)

    def drafted_by_source(self) -> dict[Source, tuple[int, ...]]:
        """Verified nodes of the sources that have any."""
        return {source: tuple(counts) for source, counts in self._drafted.items() if counts}

    def accepted_by_source(self) -> dict[Source, tuple[int, ...]]:
        """Accepted nodes of the sources that have any."""
        return {source: tuple(counts) for source, counts in self._accepted.items() if counts}


def _add(counts: dict[Source, list[int]], tree: TokenTree, nodes: Iterable[int]) -> None:
    depths, sources = tree.depth, tree.sources
    for node in nodes:
        depth = depths[node]
        for source in _named(sources[node]):
            own = counts[source]
            if len(own) < depth:
                own.extend([0] * (depth - len(own)))
            own[depth - 1] += 1


@functools.cache
def _named(bits: int) -> tuple[Source, ...]:
    """Return the sources whose bits are set; there are few different ones."""
    return tuple(source for source, bit in SOURCE_BIT.items() if bits & bit)


def num_predicted(tree: TokenTree, accepted_nodes: list[int]) -> int:
    """Count how many of the accepted nodes a prediction had named."""
    return _num_with(SOURCE_BIT["prediction"], tree, accepted_nodes)


def num_reused(tree: TokenTree, accepted_nodes: list[int]) -> int:
    """Count how many of the accepted nodes stood in the answer that another tier had written."""
    return _num_with(RECALLED_BIT, tree, accepted_nodes)


def _num_with(bit: int, tree: TokenTree, nodes: list[int]) -> int:
    return sum(bool(tree.sources[node] & bit) for node in nodes) if tree.sources else 0
