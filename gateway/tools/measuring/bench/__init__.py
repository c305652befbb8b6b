"""`outrider bench`: load, measurements and reports against any OpenAI-compatible server."""
