"""Names for rows of the ledger: unique for ever, and in the order of time."""

import itertools
import random
from collections.abc import Callable


class RowIds:
    """Counts up after a prefix that no other process has.

    Ids that begin alike and grow keep a database's index dense: a new row goes to its end.
    """

    def __init__(self, rng: random.Random, wall_clock: Callable[[], float]) -> None:
        """Store the arguments. `rng` must differ between processes; `wall_clock` is since 1970."""
        self._prefix = f"{int(wall_clock() * 1000):012x}-{rng.getrandbits(64):016x}"
        self._counter = itertools.count()

    def next(self) -> str:
        """Return an id of 38 characters."""
        return f"{self._prefix}-{next(self._counter):08x}"
