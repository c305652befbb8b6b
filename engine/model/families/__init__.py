"""Descriptions of model families: config.json in, `ModelConfig` out, a file per family."""
