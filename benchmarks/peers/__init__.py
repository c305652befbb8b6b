"""The same models and prompts in other programs, in turn."""
