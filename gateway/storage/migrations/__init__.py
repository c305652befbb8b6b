"""Migrations of the tables: one module a change, run by Alembic in the order of their names."""
