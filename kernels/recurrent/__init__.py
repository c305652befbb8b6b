"""Layers that keep a state: the gated delta rule over token trees, and what goes with it."""
