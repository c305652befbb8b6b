"""Trains models: the bundled pair and drafters of users' own."""
