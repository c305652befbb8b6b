"""The first minutes on a GPU: checks, kernels, figures."""
