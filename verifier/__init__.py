"""The acceptance rule: which token a position has, and why a tree of guesses never changes it.

Open `coupled.py` first, then docs/exactness.md, which follows the files. Terms: the target is the
model whose distribution counts. Noise is drawn from seed and position alone. A verdict is the
accepted path of a tree and its next token. A token is unratified if a cascade alone allowed it.
"""
