"""Grammars over tokens, from JSON schemas and regular expressions."""
