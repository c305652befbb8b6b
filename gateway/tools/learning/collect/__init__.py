"""`outrider router collect`: labelled training data for a router."""
