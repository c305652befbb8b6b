"""What several benchmarks use: models, prompts, turns, load, mock servers, results."""
