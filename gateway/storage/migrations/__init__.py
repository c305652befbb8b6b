"""How the tables came to be: one module a change, run by Alembic in the order of their names."""
