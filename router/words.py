"""A word that the settings and the policy share."""

from typing import Literal

WatchMode = Literal["auto", "off", "always"]
"""Watching of small answers: as calibrated, never, or for every request to `auto`."""
