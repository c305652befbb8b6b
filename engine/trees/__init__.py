"""Token trees that a pass verifies, and what became of them."""
