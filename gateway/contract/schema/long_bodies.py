"""Long bodies, read without holding up other requests."""

import asyncio
from typing import Final

_LONG_BYTES: Final = 32_768
"""From here on one pass over a body of many small values may take some milliseconds."""


async def yield_if_long(body: bytes) -> None:
    """Let other requests run before the next pass over a long body."""
    if len(body) >= _LONG_BYTES:
        await asyncio.sleep(0)
