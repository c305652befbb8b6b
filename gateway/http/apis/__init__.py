"""Other APIs than chat and completions, over the same answers."""
