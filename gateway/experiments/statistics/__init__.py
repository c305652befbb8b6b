"""Statistics that stay valid while one looks: confidence sequences, decisions, simulations."""
