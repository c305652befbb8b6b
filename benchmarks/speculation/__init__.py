"""Trees, heads and sources of guesses, on against off."""
