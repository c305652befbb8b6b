"""Turns a validated request into a job for the engine: tier, prompt, limits."""
