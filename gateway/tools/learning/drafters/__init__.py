"""`outrider draft`: train a drafter and tune its settings."""
