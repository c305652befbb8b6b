"""A guess in a tree."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class TreeCandidate:
    """A guess."""

    token_id: int
    parent: int
    depth: int
    sources: int = 0
    """Its origins (`SOURCE_BIT`)."""
    model_confidence: float = 0.0
    """The drafting model's."""
    text_confidence: float = 0.0
    """The highest of the other sources'."""
    confidence: float = 1.0
    """Both confidences combined."""
    evidence: int = 0
    """The sources and `MODEL_SILENT`."""
    edge_prob: float = 1.0
    """The chance that it is right where its parent was."""
    path_prob: float = 1.0
    """The chance that its whole path is accepted."""
    children: dict[int, int] = field(default_factory=dict)
    """By token id; the values are candidates."""
    covered: float = 0.0
    """The sum of its children's edge probabilities."""
    is_expanded: bool = False
    """The drafting model has named its children."""
    is_forced: bool = False
    """A grammar leaves one child only."""
    is_recalled: bool = False
    """A retracted answer has it."""
    offset: int | None = None
    """Its slot less the root's, in the drafting model's cache; None until that has computed it."""
    mask: int = 0
    """The slots that it sees (bit 0 is the root); 0 until the drafting model has computed it."""
