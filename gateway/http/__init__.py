"""The server: HTTP itself, the application, the APIs and the live page."""
