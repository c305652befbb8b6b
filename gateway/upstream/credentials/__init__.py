"""Signs in at upstream servers: keys that may be rotated, tokens that expire, signed requests."""
