"""From the engine's events to text, token by token, and to response bodies."""
