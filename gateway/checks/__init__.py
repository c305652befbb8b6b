"""Checks of texts before and after an answer: a service's, a function's, and redaction."""
