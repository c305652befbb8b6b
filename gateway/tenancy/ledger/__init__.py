"""The ledger: one row for each attempt, with its usage and cost."""
