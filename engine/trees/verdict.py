"""The target's verdict on one tree."""

from dataclasses import dataclass, field

from outrider.engine.sequences.sampling import NOT_FINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The target's verdict on one tree.

    accepted_nodes: the accepted path without the root. token_ids: the accepted tokens and the next
    one. The verdict on a cascade is open where the path ends at a node whose small distribution is
    not known: token_ids are the accepted ones then, and the last of them is the next step's root,
    to be computed again. Where not even the root's is known, both lists are empty. unratified: for
    each emitted token, whether the large model alone would have chosen another; empty: for none.
    is_finite: False where a number behind the next token is not; then it is left out.
    """

    accepted_nodes: list[int]
    token_ids: list[int]
    unratified: list[bool] = field(default_factory=list)
    is_finite: bool = True

    @classmethod
    def of(cls, accepted_nodes: list[int], token_ids: list[int]) -> "Verdict":
        """Return the verdict of tokens of which the last may be `NOT_FINITE`."""
        is_finite = not token_ids or token_ids[-1] != NOT_FINITE
        tokens = token_ids if is_finite else token_ids[:-1]
        return cls(accepted_nodes=accepted_nodes, token_ids=tokens, is_finite=is_finite)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were right; the next token is not counted."""
        return len(self.accepted_nodes)

    @property
    def nodes(self) -> list[int]:
        """For each emitted token, the node whose logits chose it."""
        return [0, *self.accepted_nodes][: len(self.token_ids)]
