"""Every failure's HTTP status and OpenAI error body."""
