"""Sessions of agents and users whose prompts come back."""
