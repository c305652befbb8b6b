"""Storage of keys and the ledger: SQLite for one machine, PostgreSQL for several."""
