"""A/B experiments: assignment of settings, measurement, conclusions."""
