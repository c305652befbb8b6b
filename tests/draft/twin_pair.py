"""A pair whose small model is the large one."""

from tests.engines import (
    Pair,
    tiny_pair,
)


def twins() -> Pair:
    """The small model is the large one."""
    pair = tiny_pair()
    return Pair(
        large=pair.large,
        small=pair.large,
        large_reference=pair.large_reference,
        small_reference=pair.large_reference,
    )
