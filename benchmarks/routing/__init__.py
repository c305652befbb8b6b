"""Routers and cascades: quality, cost, hand-over."""
