"""The target's verdicts: on one tree, and on the trees of a step that the device knows alone."""

from dataclasses import dataclass, field

from torch import Tensor

from outrider.verifier.params import record
from outrider.verifier.sampling import NOT_FINITE


@record(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The target's verdict on one tree.

    A cascade needs the small model's distribution at every node. Where it is missing, the verdict
    is open: `token_ids` holds only accepted tokens. The next step computes the last of them again,
    as its root.
    """

    accepted_nodes: list[int]
    """The accepted path, without the root."""
    token_ids: list[int]
    """The accepted tokens and the next one. Empty where a cascade does not know the root's
    distribution."""
    unratified: list[bool] = field(default_factory=list)
    """For each token, whether the large model alone would have chosen another. Empty: none."""
    is_finite: bool = True
    """False where a number behind the next token is not finite; that token is left out."""

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
        """Return for each emitted token the node whose logits chose it."""
        return [0, *self.accepted_nodes][: len(self.token_ids)]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ForestVerdicts:
    """The target's verdicts on a forest, on the device."""

    accepted_path: Tensor
    """int64 [num_trees, max_depth], the flat row of the accepted node at depth d + 1; -1 beyond the
    last."""
    emitted_tokens: Tensor
    """int64 [num_trees, max_depth + 1], the accepted nodes' tokens and the next one; -1 beyond."""
