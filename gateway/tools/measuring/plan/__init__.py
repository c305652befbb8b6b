"""`outrider plan`: how many users fit, how long they wait, and what it costs."""
