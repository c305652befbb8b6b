"""`outrider router`: train, evaluate, calibrate and report on a router."""
