"""`outrider keys`, `usage` and `experiment`: commands on the database."""
