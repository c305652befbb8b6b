"""Upstream tiers: requests to them, their choice, their health and their replacement."""
