"""News of a folder of extents: the codes of the blocks that texts can go on from, once read back.

A code stands for a block's hash in a file's name. Who has the names' key can tell from a text's
hashes what of it lies on the disk; nobody can tell a text, or a hash, from a code.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Final

from outrider.engine.cache.extent_space import ExtentSpace

_MOST_FILES: Final = 2**17  # that are told of; their codes fit into a message
_SHARE: Final = 0.01  # of the time, at most, to look for what has changed


class StoredNews:
    """Tells what came to lie in some spaces, and what went. Belongs to the engine's thread.

    Two files may have a block in common, and only one of them goes: it counts as gone. So news may
    be wrong, which costs time only.
    """

    def __init__(
        self,
        spaces: Sequence[tuple[ExtentSpace, str]],
        *,
        names_key: bytes,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`spaces`: each with the letter of the files that a hit may end with."""
        self.names_key = names_key
        self._spaces = spaces
        self._clock = clock
        self._told: set[str] = set()
        self._num_changes = -1
        self._next_s = 0.0

    def codes(self) -> bytes:
        """Return the codes of all blocks, joined; `take` tells what changes from then on."""
        self._told = set(islice(self._names(), _MOST_FILES))
        return _codes(self._told)

    def take(self) -> tuple[bytes, bytes]:
        """Return the codes that came and those that went since the last call.

        Of what has changed now, some is told later.
        """
        num_changes = sum(space.num_changes for space, _ in self._spaces)
        begun_s = self._clock()
        if num_changes == self._num_changes or begun_s < self._next_s:
            return b"", b""
        self._num_changes = num_changes
        names = set(self._names())
        gone = self._told - names
        come = set(islice(names - self._told, _MOST_FILES - len(self._told) + len(gone)))
        self._told = (self._told - gone) | come
        ended_s = self._clock()
        self._next_s = ended_s + (ended_s - begun_s) / _SHARE
        return _codes(come), _codes(gone)

    def _names(self) -> Iterator[str]:
        for space, letter in self._spaces:
            yield from (name for name in space.file_names() if name.startswith(letter))


def _codes(names: set[str]) -> bytes:
    return "".join(ExtentSpace.codes_of(name) for name in names).encode()
