"""Ollama's API (https://docs.ollama.com/api), as a server."""
