"""The error for settings, apart from the settings: an engine's process loads none of them."""


class SettingsError(Exception):
    """Raised for invalid settings; the message names each one, its source and its valid values."""
