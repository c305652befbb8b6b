"""Fleets and objectives in virtual time."""
