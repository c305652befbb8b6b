"""A sentence encoder beside the small model's prefill, and what labelled neighbours say."""
