"""Reads a request once: its names, its place, what it needs and may ask for."""
