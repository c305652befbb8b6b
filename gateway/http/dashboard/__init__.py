"""The figures of the live page."""
