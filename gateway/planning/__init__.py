"""From a validated request to a job for the engine: tier, prompt, limits."""
