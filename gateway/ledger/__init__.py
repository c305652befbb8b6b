"""What was done for whom, and what it cost: one row for each attempt."""
