"""A kept answer, and the stores that keep it."""

from typing import Protocol

import msgspec


class CachedEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A whole answer. Token counts are those that its first client received."""

    parts: tuple[bytes, ...]
    """Its events, or its one body."""
    tier: str
    model: str
    num_prompt_tokens: int
    num_completion_tokens: int
    made_at: float
    """Seconds since 1970."""
    is_streamed: bool
    headers: dict[str, str] = {}
    """Headers of the answer itself."""

    @property
    def num_bytes(self) -> int:
        """The size of the answer."""
        return sum(map(len, self.parts))

    @property
    def owner(self) -> str:
        """Nobody's: all answers share one bound."""
        return ""


class CacheStore(Protocol):
    """Keeps entries by key for a bounded time, in bounded memory."""

    async def get(self, key: bytes) -> CachedEntry | None:
        """Return the entry; None where there is none or the store does not answer. Never raises."""

    async def put(self, key: bytes, entry: CachedEntry) -> object:
        """Keep an entry, as far as there is room. Never raises."""

    async def close(self) -> None:
        """Release connections."""
