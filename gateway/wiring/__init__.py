"""Builds the engine and the gateway from settings."""
