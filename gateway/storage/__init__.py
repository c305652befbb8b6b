"""Where keys and the ledger are kept: SQLite for one machine, PostgreSQL for several."""
