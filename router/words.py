"""Words that several modules of the router share."""

from typing import Literal

# The same as `Tier` in verifier/params.py, which router/ may not import.
Tier = Literal["small", "large"]
CascadeMode = Literal["auto", "off", "always"]
"""Watching of small answers: as calibrated, never, or for every request to `auto`."""
