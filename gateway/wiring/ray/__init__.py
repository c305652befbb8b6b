"""Engines as a Ray Serve application: Ray places, restarts and scales them.

Tokens never cross Ray: each replica starts an engine's process (`outrider engine`), and gateways
talk to that over their own connections. Nothing outside this room imports Ray.
"""
