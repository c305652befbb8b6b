"""Who asks: keys, teams, scopes."""
