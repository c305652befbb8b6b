"""Reserves, counts and books the usage of each request."""
