"""A/B experiments: who gets which settings, what is measured, what may be concluded."""
