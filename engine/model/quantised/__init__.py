"""Quantised checkpoints, decoded tensor by tensor as they are read: a file per kind of numbers."""
