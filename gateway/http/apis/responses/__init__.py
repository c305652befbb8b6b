"""OpenAI's /v1/responses over chat completions; responses are stored where settings want it."""
