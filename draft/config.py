"""Settings of the drafter: depth, width, sources."""

from dataclasses import dataclass

from outrider.engine.request import SpeculationParams
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.verifier.params import SOURCES, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What a request's trees may have at most."""

    sources: frozenset[Source]
    max_nodes: int
    max_depth: int | None
    """None: as many levels as nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Limits of one sequence's tree; a request may ask for less, not for more."""

    max_draft_nodes: int = 64
    """Nodes that the target judges; 0 means none."""
    max_draft_depth: int = 16
    """Levels that the drafting model adds; 0 means that it is not asked."""
    max_text_depth: int = 48
    """Levels that earlier text, predictions and grammars add."""
    max_branching: int = 3
    """Children of a node that are considered."""
    max_frontier: int = 4
    """Nodes that one small pass expands."""
    min_path_prob: float = 0.02
    """Guesses less likely than this are not worth a row."""
    max_catch_up_tokens: int = 1024
    """Tokens of text that the small model computes per pass before it can draft, for all sequences
    together."""
    sources: tuple[Source, ...] = SOURCES
    """The sources that may guess."""

    def sources_of(self, own: SpeculationParams) -> frozenset[Source]:
        """Return the sources that a request allows as well."""
        allowed = frozenset(self.sources)
        return allowed if own.sources is None else allowed & frozenset(own.sources)

    def limits_of(self, own: SpeculationParams) -> DraftLimits:
        """Return the limits of a request's trees."""
        nodes = self.max_draft_nodes if own.enabled else 0
        if own.max_draft_nodes is not None:
            nodes = min(nodes, own.max_draft_nodes)
        return DraftLimits(
            sources=self.sources_of(own), max_nodes=nodes, max_depth=own.max_draft_depth
        )

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        most_guesses = MAX_TREE_NODES - 1  # beside the root
        for name, least, largest in (
            ("max_draft_nodes", 0, most_guesses),
            ("max_draft_depth", 0, most_guesses),
            ("max_text_depth", 0, most_guesses),
            ("max_branching", 1, 64),
            ("max_frontier", 1, 64),
        ):
            value = getattr(self, name)
            if not least <= value <= largest:
                raise ValueError(f"{name}={value} must be in [{least}, {largest}]")
        if unknown := set(self.sources) - set(SOURCES):
            raise ValueError(f"sources={sorted(unknown)} must be among {', '.join(SOURCES)}")
        if not 0.0 <= self.min_path_prob < 1.0:
            raise ValueError(f"min_path_prob={self.min_path_prob} must be in [0, 1)")
