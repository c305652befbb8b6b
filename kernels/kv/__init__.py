"""Write and move cached keys and values."""
