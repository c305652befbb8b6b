"""OpenAI's /v1/responses over chat completions, with stored responses where the settings want it."""
