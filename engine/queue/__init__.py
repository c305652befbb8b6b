"""Order of waiting and running sequences."""
