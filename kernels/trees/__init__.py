"""Token trees on the device: grown for all sequences of a step at once, selected, verified.

The host begins each tree with the guesses from text (`init_trees`); after each pass of the small
model `expand_tree` adds its guesses and `choose_frontier` says what the next pass computes; in the
end `select_trees` takes the likeliest guesses of all trees. Nothing in between waits for the host
or tells it a count. The semantics are those of `outrider.draft.trees.growing_tree.GrowingTree`
without grammar and cascade. `verify_tree` applies the acceptance rule to what was selected.
"""
