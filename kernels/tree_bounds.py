"""The bounds of a token tree, which its masks of ancestors set."""

from typing import Final

MAX_TREE_NODES: Final = 256
"""Nodes of a tree, its root included; each has a bit in a mask, and a slot in the draft view."""
MASK_WORDS: Final = MAX_TREE_NODES // 64
"""Words of 64 bits in a node's mask of ancestors."""
