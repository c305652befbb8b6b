"""What an answer is, which tier gave it and why, and how it ended."""
