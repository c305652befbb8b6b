"""Best-first trees of guesses on the device, for all sequences of a step at once.

The host begins each tree with the guesses from text (`init_trees`); after each pass of the small
model `expand_tree` adds its guesses and `choose_frontier` says what the next pass computes; in the
end `select_trees` takes the likeliest guesses of all trees. Nothing in between waits for the host
or tells it a count. The semantics are those of `outrider.draft.trees.growing_tree.GrowingTree`
without grammar and cascade.
"""

from outrider.kernels.trees.choose_frontier import FrontierRows, choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.initial_trees import (
    InitialTree,
    TreeGuess,
    capacity_for,
    init_trees,
    padding_tree,
    write_trees,
)
from outrider.kernels.trees.parent_rows import keep_rows, parent_rows
from outrider.kernels.trees.select_trees import SelectedTrees, select_trees
from outrider.kernels.trees.tree_state import TreeState

__all__ = [
    "EdgeTable",
    "FrontierRows",
    "InitialTree",
    "SelectedTrees",
    "TreeGuess",
    "TreeState",
    "capacity_for",
    "choose_frontier",
    "expand_tree",
    "init_trees",
    "keep_rows",
    "padding_tree",
    "parent_rows",
    "select_trees",
    "write_trees",
]
