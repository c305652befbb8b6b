"""Passes of one model: rows laid out, buffers, CUDA graphs, times."""
