"""Choosing between local models and upstream tiers for a request, and moving on between them."""
