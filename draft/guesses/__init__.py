"""Sources of guesses: the small model, heads on the large one, repeated text."""
