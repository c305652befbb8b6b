"""Trees of guesses: their nodes, their growth on the host, their batches."""
