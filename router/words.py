"""Words that the settings and the policy share."""

from typing import Literal

WatchMode = Literal["auto", "off", "always"]
"""Watching of small answers: as calibrated, never, or for every request to `auto`."""

Prefer = Literal["latency", "price", "quality"]
"""What counts first in the choice of a tier: an early first token, a low price, a right answer."""
