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
    def end_user(self) -> str:
        """The end user, as the ledger has it; empty where none was named."""

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
    """The last minute second by second, and each of the days of UTC that limits count."""

    @property
    def minute(self) -> Sequence[PastUse]:
        """Each within one second."""

    @property
    def days(self) -> Sequence[PastUse]:
        """Each within one day, the oldest first."""

    @property
    def end_user_days(self) -> Sequence[PastUse]:
        """The same of each end user that limits count, over all tiers."""


History = Callable[[], Awaitable[PastUses]]
