"""Counters that take few bytes, and those of end users."""
