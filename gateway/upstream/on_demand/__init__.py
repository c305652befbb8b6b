"""Upstream tiers whose server is a process of this machine, started when a request needs it."""
