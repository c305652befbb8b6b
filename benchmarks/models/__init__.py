"""Products, experts, quantised weights: how fast, how large, how good."""
