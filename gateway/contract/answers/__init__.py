"""The parts of an answer: its tier and the reason for it, its facts, and how it ended."""
