"""What engines ask each other for: blocks of a text by their hashes, which come as extents.

A hash covers the text before it, the tenant's salt and the arithmetic. An engine asks only for
hashes that it computed itself from a request of its gateway, so nobody else's can be guessed.
"""

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.extents import MOST_BLOCKS, Extent
from outrider.engine.errors import EngineError
from outrider.verifier.params import Tier

MOST_WAIT_S: Final = 600.0
"""No engine waits longer for blocks of another."""


class PeerError(EngineError):
    """Another engine cannot be asked for blocks, or refuses them. They are computed here."""

    code = "peer_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksWanted:
    """Blocks that follow each other in a text: as many as an extent holds."""

    tier: Tier
    fingerprint: str
    """Of the cache that they are for; another one has other numbers."""
    first: int
    """The index of the first block in its text."""
    parent: BlockHash
    """The hash before it."""
    hashes: tuple[BlockHash, ...]
    wait_s: float
    """How long they are waited for while they are being computed."""

    def __post_init__(self) -> None:
        """Raise ValueError for a field that no engine would send."""
        if not 1 <= len(self.hashes) <= MOST_BLOCKS:
            raise ValueError(f"hashes has {len(self.hashes)}; 1 to {MOST_BLOCKS} may be asked for")
        if not (math.isfinite(self.wait_s) and 0 <= self.wait_s <= MOST_WAIT_S):
            raise ValueError(f"wait_s={self.wait_s} must be in [0, {MOST_WAIT_S:g}]")
        if self.first < 0:
            raise ValueError(f"first={self.first} must be 0 or positive")


class Peers(Protocol):
    """The lines to other engines. Never blocks."""

    def pull(self, endpoint: str, wanted: BlocksWanted) -> "Future[list[Extent]]":
        """Ask the engine at an address for blocks.

        The result is empty where they did not come to be there in time. Raises, in the future:
        PeerError where the engine cannot be reached or refuses, ExtentError for damaged blocks.
        """
