"""The dimensions that usage can be summed by."""

from typing import Literal

Dimension = Literal["key", "team", "tier", "model", "day", "kind", "outcome", "end_user"]
