"""A gateway under faults: what it answers, books and leaks."""
