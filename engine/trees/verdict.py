"""The target's verdict on one tree."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The target's verdict on one tree.

    accepted_nodes: the accepted path without the root. token_ids: the accepted tokens and the next
    one. The verdict on a cascade is open where the path ends at a node whose small distribution is
    not known: token_ids are the accepted ones then, and the last of them is the next step's root,
    to be computed again. Where not even the root's is known, both lists are empty. unratified: for
    each emitted token, whether the large model alone would have chosen another; empty: for none.
    """

    accepted_nodes: list[int]
    token_ids: list[int]
    unratified: list[bool] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were right; the next token is not counted."""
        return len(self.accepted_nodes)

    @property
    def nodes(self) -> list[int]:
        """For each emitted token, the node whose logits chose it."""
        return [0, *self.accepted_nodes][: len(self.token_ids)]
