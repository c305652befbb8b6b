"""Tokens of identity providers: their keys, their check, and the principals they stand for."""
