"""Compiled grammars, kept for each tenant apart.

A tenant that could find what another tenant's request had compiled would learn from the time of an
answer which schemas others use. So an entry belongs to a cache salt, as in the prefix cache; only
grammars that no client wrote are shared.
"""

from collections import OrderedDict
from concurrent.futures import Future

from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.request import GrammarSpec

_Future = Future[TokenGrammar]
_Entries = OrderedDict[GrammarSpec, _Future]


class GrammarCache:
    """Futures of grammars by salt and spec, up to a number and a size together.

    What is over goes from the salt that holds most, there the least recently used first: one
    tenant's grammars never displace those of a tenant that has fewer. Not thread-safe.
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._shared: _Entries = OrderedDict()  # few, and of our own making: they stay
        self._salts: dict[str, _Entries] = {}

    def __len__(self) -> int:
        """Count how many entries clients' grammars have."""
        return sum(map(len, self._salts.values()))

    def get(self, spec: GrammarSpec, salt: str) -> _Future | None:
        """The future that was put for a spec and a salt, now used last."""
        entries = self._of(spec, salt)
        future = entries.get(spec)
        if future is not None:
            entries.move_to_end(spec)
        return future

    def put(self, spec: GrammarSpec, salt: str, future: _Future) -> None:
        """Keep a future and drop what is over, but nothing that is being compiled."""
        if _is_built_in(spec):
            self._shared[spec] = future
            return
        self._salts.setdefault(salt, OrderedDict())[spec] = future
        self._shrink()

    def _of(self, spec: GrammarSpec, salt: str) -> _Entries:
        return self._shared if _is_built_in(spec) else self._salts.get(salt, OrderedDict())

    def _shrink(self) -> None:
        num_entries = {salt: len(entries) for salt, entries in self._salts.items()}
        num_bytes = {
            salt: sum(map(_size_bytes, entries.values())) for salt, entries in self._salts.items()
        }
        over_entries = sum(num_entries.values()) - self._max_entries
        over_bytes = sum(num_bytes.values()) - self._max_bytes
        candidates = set(self._salts)
        while candidates and (over_entries > 0 or over_bytes > 0):
            salt = max(
                sorted(candidates),
                key=lambda salt: max(
                    num_entries[salt] / self._max_entries, num_bytes[salt] / self._max_bytes
                ),
            )
            freed_bytes = self._drop_oldest(salt)
            if freed_bytes is None:
                candidates.remove(salt)
                continue
            num_entries[salt] -= 1
            num_bytes[salt] -= freed_bytes
            over_entries -= 1
            over_bytes -= freed_bytes

    def _drop_oldest(self, salt: str) -> int | None:
        """Drop a salt's least recently used entry; its size, or None where none can go."""
        entries = self._salts.get(salt, OrderedDict())
        oldest = next((spec for spec, future in entries.items() if future.done()), None)
        if oldest is None:
            return None
        size_bytes = _size_bytes(entries.pop(oldest))
        if not entries:
            del self._salts[salt]
        return size_bytes


def _is_built_in(spec: GrammarSpec) -> bool:
    return spec.kind == "json" and not spec.text


def _size_bytes(future: _Future) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return int(getattr(future.result(), "size_bytes", 0))
