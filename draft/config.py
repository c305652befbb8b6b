"""How far and how wide the drafter guesses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Limits of one sequence's tree; a request may ask for less, not for more.

    max_draft_nodes: nodes that the target judges. max_draft_depth: levels; 0 of either means none.
    max_branching: children of a node that are considered. max_frontier: nodes that one small pass
    expands. min_path_prob: guesses less likely than this are not worth a row. max_catch_up_tokens:
    how many prompt tokens the small model takes in per pass before it can draft.
    """

    max_draft_nodes: int = 32
    max_draft_depth: int = 16
    max_branching: int = 3
    max_frontier: int = 4
    min_path_prob: float = 0.02
    max_catch_up_tokens: int = 1024

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        # 255 draft nodes and the root fill the attention kernels' 256 mask bits.
        for name, least, largest in (
            ("max_draft_nodes", 0, 255),
            ("max_draft_depth", 0, 255),
            ("max_branching", 1, 64),
            ("max_frontier", 1, 64),
        ):
            value = getattr(self, name)
            if not least <= value <= largest:
                raise ValueError(f"{name}={value} must be in [{least}, {largest}]")
        if not 0.0 <= self.min_path_prob < 1.0:
            raise ValueError(f"min_path_prob={self.min_path_prob} must be in [0, 1)")
