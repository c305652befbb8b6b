"""Mixtures of experts: which experts a row goes to, and their products."""
