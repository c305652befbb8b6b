"""The trace of a step: the sources of a request's tokens, and the tree that was verified."""

from dataclasses import dataclass
from typing import Literal

from outrider.verifier.params import Source

# small: the small model's own word, because its tier answers or because a cascade let it stand.
# target: the large model's own. grammar: nothing else was allowed. reused: drafted from the answer
# that was retracted at a change of tier, and right. Else the source that had drafted the token.
TokenOrigin = Source | Literal["small", "target", "reused"]
NodeSource = Source | Literal["reused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """A node of a verified tree."""

    token_id: int
    parent: int
    """Its place in the step's nodes; -1 of the root."""
    sources: tuple[NodeSource, ...] = ()
    """All that had guessed it; none of the root."""
    is_accepted: bool = False
    """It is on the path that the target accepted. The root always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step of one sequence."""

    origins: tuple[TokenOrigin, ...]
    """One for each emitted token."""
    nodes: tuple[TraceNode, ...] = ()
    """The tree, root first and parents before children. Empty where nothing was drafted."""
