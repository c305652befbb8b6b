"""Rate limits and budgets of tenants: reservations against exact limits."""
