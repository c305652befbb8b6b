"""OpenAI's /v1/responses over chat completions, without memory of earlier responses."""
