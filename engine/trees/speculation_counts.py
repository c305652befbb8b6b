"""Counts of verified and accepted guesses, by depth and by source."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

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
    # Of trees by how long their accepted path is, of nodes by the bits of their sources and depth:
    # sorted out once they are asked for.
    _paths: Counter[int] = field(default_factory=Counter)
    _drafted: Counter[tuple[int, int]] = field(default_factory=Counter)
    _accepted: Counter[tuple[int, int]] = field(default_factory=Counter)

    def count(self, tree: TokenTree, accepted_nodes: list[int]) -> None:
        """Add one verified tree; one that names no sources is left out by source."""
        if not tree.num_draft_nodes:
            return
        self.num_drafts += 1
        self.num_draft_tokens += tree.num_draft_nodes
        self.num_accepted_tokens += len(accepted_nodes)
        self._paths[len(accepted_nodes)] += 1
        if tree.sources:
            kinds = list(zip(tree.sources, tree.depth, strict=True))
            for kind in kinds[1:]:
                self._drafted[kind] += 1
            for node in accepted_nodes:
                self._accepted[kinds[node]] += 1

    def accepted_per_depth(self) -> tuple[int, ...]:
        """Accepted nodes of each depth."""
        reached = range(max(self._paths, default=0), 0, -1)
        counts = list(accumulate(self._paths[length] for length in reached))
        return tuple(counts[::-1])

    def drafted_by_source(self) -> dict[Source, tuple[int, ...]]:
        """Verified nodes of the sources that have any."""
        return _by_source(self._drafted)

    def accepted_by_source(self) -> dict[Source, tuple[int, ...]]:
        """Accepted nodes of the sources that have any."""
        return _by_source(self._accepted)


def _by_source(counts: Counter[tuple[int, int]]) -> dict[Source, tuple[int, ...]]:
    found: dict[Source, tuple[int, ...]] = {}
    for source in SOURCES:
        own: Counter[int] = Counter()
        for (bits, depth), number in counts.items():
            if bits & SOURCE_BIT[source]:
                own[depth] += number
        if own:
            found[source] = tuple(own[depth] for depth in range(1, max(own) + 1))
    return found


def num_predicted(tree: TokenTree, accepted_nodes: list[int]) -> int:
    """Count how many of the accepted nodes a prediction had named."""
    return _num_with(SOURCE_BIT["prediction"], tree, accepted_nodes)


def num_reused(tree: TokenTree, accepted_nodes: list[int]) -> int:
    """Count how many of the accepted nodes stood in the answer that another tier had written."""
    return _num_with(RECALLED_BIT, tree, accepted_nodes)


def _num_with(bit: int, tree: TokenTree, nodes: list[int]) -> int:
    return sum(bool(tree.sources[node] & bit) for node in nodes) if tree.sources else 0
