"""The tokens that one sequence asks the target to judge in one pass."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from torch import Tensor

from outrider.verifier.params import SOURCES, Source

# A node's sources as bits: several may have guessed the same token.
SOURCE_BIT: Final[dict[Source, int]] = {source: 1 << bit for bit, source in enumerate(SOURCES)}

# Beside them: the answer that was retracted at a change of tier has the same token here. The bit
# below it is `MODEL_SILENT` (draft/budget/calibration.py).
RECALLED_BIT: Final = 2 << len(SOURCES)


@dataclass(kw_only=True)
class TokenTree:
    """A prefix tree of guesses below the sequence's last token. Lists are [num_nodes], on the host.

    Node 0 is the root: the last emitted token, whose keys and values are not computed yet. Plain
    decoding is a tree of one node; a chain is a tree without branches.
    """

    token_ids: list[int]
    """The children of one node differ."""
    parent_index: list[int]
    """Parents stand before children; -1 for the root."""
    sources: list[int] = field(default_factory=list)
    """`SOURCE_BIT` and `RECALLED_BIT` of each node, 0 for the root. Empty where they are not
    wanted."""
    draft_logits: list[Tensor | None] = field(default_factory=list)
    """The small model's logits at each node, [vocab_size], where it computed them. Kept for a
    cascade only, else empty."""

    @classmethod
    def root_only(cls, token_id: int) -> "TokenTree":
        """The tree of plain decoding."""
        return cls(token_ids=[token_id], parent_index=[-1])

    @property
    def num_nodes(self) -> int:
        """Count all nodes, the root included."""
        return len(self.token_ids)

    @property
    def num_draft_nodes(self) -> int:
        """Nodes without the root: what was drafted."""
        return len(self.token_ids) - 1

    @property
    def has_root_logits(self) -> bool:
        """True if the small model's logits are there for the root."""
        return bool(self.draft_logits) and self.draft_logits[0] is not None

    @cached_property
    def depth(self) -> list[int]:
        """Distance from the root, [num_nodes]."""
        depth = [0] * len(self.parent_index)
        for node, parent in enumerate(self.parent_index):
            if parent >= 0:
                depth[node] = depth[parent] + 1
        return depth

    @cached_property
    def ancestor_mask(self) -> list[int]:
        """Return for each node a bitmask of the nodes on its path, itself included, [num_nodes]."""
        masks: list[int] = []
        for node, parent in enumerate(self.parent_index):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        return masks

    @cached_property
    def paths(self) -> list[list[int]]:
        """Return each node's tokens below the root, its own last, [num_nodes]; [] for the root."""
        paths: list[list[int]] = []
        for token, parent in zip(self.token_ids, self.parent_index, strict=True):
            paths.append([*paths[parent], token] if parent >= 0 else [])
        return paths

    def truncated(self, num_nodes: int) -> "TokenTree":
        """The first `num_nodes` nodes; they are a tree since parents stand before children."""
        if num_nodes >= self.num_nodes:
            return self
        return TokenTree(
            token_ids=self.token_ids[:num_nodes],
            parent_index=self.parent_index[:num_nodes],
            sources=self.sources[:num_nodes],
            draft_logits=self.draft_logits[:num_nodes],
        )
