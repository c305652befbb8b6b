"""A guess in a tree."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class TreeCandidate:
    """A guess.

    sources: its origins (`SOURCE_BIT`). model_confidence is the drafting model's, text_confidence
    the highest of the others'; `confidence` is what they come to together, and `evidence` the
    sources and `MODEL_SILENT`. edge_prob: the chance that it is right where its parent was;
    path_prob: that its whole path is accepted. `covered` is the sum of its children's edge
    probabilities.
    `offset` and `mask`: its place behind the root's slot in the draft view and the slots it sees
    (bit 0 is the root); None and 0 until the small model has computed it.
    """

    token_id: int
    parent: int
    depth: int
    sources: int = 0
    model_confidence: float = 0.0
    text_confidence: float = 0.0
    confidence: float = 1.0
    evidence: int = 0
    edge_prob: float = 1.0
    path_prob: float = 1.0
    children: dict[int, int] = field(default_factory=dict)  # token id -> candidate
    covered: float = 0.0
    is_expanded: bool = False  # the small model has named its children
    is_forced: bool = False  # a grammar leaves one child only
    is_recalled: bool = False  # a retracted answer has it
    offset: int | None = None
    mask: int = 0
