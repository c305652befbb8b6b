"""Commands that measure: bench and plan."""
