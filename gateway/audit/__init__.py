"""The audit log: who changed what, in a chain of hashes that shows what was altered."""
