"""The drafter: cheap guesses of the next tokens, which the large model judges in one pass.

Open `tree_drafter.py` first: `TreeDrafter.propose` makes the trees of a step. Terms: a guess is a
chain of expected tokens, and a source is where it came from. A candidate is a node of a tree while
it grows; the frontier is what the next draft pass computes. The budget bounds a tree by its time.
"""
