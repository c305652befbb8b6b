"""Which requests wait, which run, and in which order."""
