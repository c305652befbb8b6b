"""Guesses from text: suffixes that were seen before, predicted outputs, vocabularies."""
