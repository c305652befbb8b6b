"""How much each tenant may ask for: reservations against exact limits."""
