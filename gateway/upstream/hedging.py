"""The budget of second requests for late answers."""

from typing import Final

_MAX_SAVED: Final = 10.0
"""Hedges that quiet times may save up: a slow minute must not double the load."""


class HedgeBudget:
    """A token bucket: every request adds `share` of a hedge, every hedge takes a whole one.

    It begins empty, so there are never more hedges than `share` times the requests.
    """

    __slots__ = ("_saved", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = 0.0

    @property
    def is_on(self) -> bool:
        """Return whether hedging is enabled."""
        return self._share > 0

    def earn(self) -> None:
        """Add a request's share of a hedge."""
        self._saved = min(self._saved + self._share, _MAX_SAVED)

    def spend(self) -> bool:
        """Take one hedge; False where none is left."""
        # Ten times 0.1 is a little less than 1.
        if self._saved < 1 - 1e-9:
            return False
        self._saved = max(0.0, self._saved - 1)
        return True
