"""The HTTP application: endpoints, authentication, responses, start and shutdown."""
