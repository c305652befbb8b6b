"""Blocks of a paged KV cache, and each sequence's view of them."""
