"""Shared parts of benchmarks: models, prompts, turns, load, mock servers, results."""
