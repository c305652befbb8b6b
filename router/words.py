"""Words that several modules of the router share."""

from typing import Literal

# The engine's word, said again: router/ may not import engine/.
Tier = Literal["small", "large"]
CascadeMode = Literal["auto", "off", "always"]
"""Watching of small answers: as calibrated, never, or for every request to `auto`."""
