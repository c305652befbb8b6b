"""Requests under way by key, so that they end when their key does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from gateway.errors.tree import AuthenticationError

EndRequest = Callable[[AuthenticationError], None]
"""Ends a running request with this error; called once, in the event loop, and must not block."""


class KeyState(Protocol):
    """Checks that a key is still valid."""

    def gone(self, key_id: str) -> AuthenticationError | None:
        """Return why the key of a running request is not valid any more; None: it is valid."""


class RunningRequests:
    """Requests under way, by the ids of their keys. For one event loop.

    `check` costs one look-up for each key that has requests under way; a token costs nothing.
    """

    def __init__(self, keys: KeyState) -> None:
        self._keys = keys
        self._ends: dict[str, set[EndRequest]] = {}

    def __len__(self) -> int:
        """Return the number of keys with requests under way."""
        return len(self._ends)

    @contextmanager
    def of_key(self, key_id: str, end: EndRequest) -> Iterator[None]:
        """Call `end` if the key ends in this context.

        Raises AuthenticationError where it has ended since the request was admitted.
        """
        if (error := self._keys.gone(key_id)) is not None:
            raise error
        ends = self._ends.setdefault(key_id, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends and self._ends.get(key_id) is ends:
                del self._ends[key_id]

    def check(self) -> None:
        """End the requests of keys that are not valid any more."""
        for key_id in list(self._ends):
            if (error := self._keys.gone(key_id)) is not None:
                for end in self._ends.pop(key_id):
                    end(error)
