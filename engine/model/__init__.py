"""A checkpoint on a device: configuration, weights, KV cache, forward pass."""
