"""Attention over a paged cache, for causal rows and token trees."""
