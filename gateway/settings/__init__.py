"""All settings: flags over environment over outrider.toml over defaults."""
