"""Tenants: keys, limits, the ledger, and what each request used."""
