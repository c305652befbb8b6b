"""Turns the engine's events into text, token by token, and into response bodies."""
