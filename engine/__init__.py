"""The engine: it runs steps of passes over two models and turns requests into events.

Open `core.py` first: `Engine.step` is one step. Terms: a sequence is a request on its way. A pass
is one forward call of a model over rows; a row is one token's place in it. A block holds the keys
and values of some tokens; a view is a sequence's hold on blocks.
"""
