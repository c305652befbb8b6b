"""`outrider fleet`."""
