"""An acceptance rule with a fault, for the laws that have to find it."""

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict


def favour(trees: SequenceOf[TokenTree], logits: Tensor) -> Tensor:
    """Logits in which each guess is a little likelier than it is."""
    favoured = logits.clone()
    row = 0
    for tree in trees:
        for node, parent in enumerate(tree.parent_index[1:], start=1):
            favoured[row + parent, tree.token_ids[node]] += 0.5
        row += tree.num_nodes
    return favoured


class LenientVerifier(CoupledVerifier):
    """Accepts drafted tokens a little more often than it should."""

    def verify(
        self, sequences: SequenceOf[Sequence], trees: SequenceOf[TokenTree], logits: Tensor
    ) -> list[Verdict]:
        """Judge as the right rule does, but by other logits."""
        return super().verify(sequences, trees, favour(trees, logits))
