"""Tenants: keys, teams, scopes and authentication."""
