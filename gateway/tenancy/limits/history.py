"""Usage from before this process began, read from the ledger."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class PastUse(Protocol):
    """The charge of one key at one tier in a stretch of time that begins at `at_s`."""

    @property
    def at_s(self) -> int:
        """Whole seconds since 1970 (UTC)."""

    @property
    def key_id(self) -> str:
        """The key's public id."""

    @property
    def team_id(self) -> str | None:
        """The id of its team."""

    @property
    def tier(self) -> str:
        """The tier that answered."""

    @property
    def requests(self) -> int:
        """API requests."""

    @property
    def tokens(self) -> int:
        """Prompt and answer, as far as they were charged."""

    @property
    def usd_nanos(self) -> int:
        """The charge."""


class PastUses(Protocol):
    """The last minute second by second; this day and this month of UTC as sums."""

    @property
    def minute(self) -> Sequence[PastUse]:
        """Each within one second."""

    @property
    def day(self) -> Sequence[PastUse]:
        """Usage since the last midnight."""

    @property
    def month(self) -> Sequence[PastUse]:
        """Usage since the first of the month."""


History = Callable[[], Awaitable[PastUses]]
