"""Names for rows of the ledger: unique for ever, and in the order of time."""

import itertools
import random
from collections.abc import Callable, Iterator


def row_ids(rng: random.Random, wall_clock: Callable[[], float]) -> Iterator[str]:
    """Return ids of 38 characters that count up after a prefix that no other process has.

    Ids that begin alike and grow keep a database's index dense: a new row goes to its end. `rng`
    must differ between processes; `wall_clock` is since 1970.
    """
    prefix = f"{int(wall_clock() * 1000):012x}-{rng.getrandbits(64):016x}"
    return map(f"{prefix}-{{:08x}}".format, itertools.count())
