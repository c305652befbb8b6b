"""The parts of a step: the large model's pass, tier switches, deferred host work."""
