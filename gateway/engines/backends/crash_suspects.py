"""Requests that were in flight when an engine died; after two deaths they are not taken again."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import msgspec

from outrider.engine.errors import CrashSuspectError
from outrider.engine.request import EngineRequest

MAX_DEATHS: Final = 2
"""A request that was in flight at so many deaths of the engine is refused."""

EXPIRES_S: Final = 600.0
"""So long after the last of them."""

_MAX_REMEMBERED: Final = 4096
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Record:
    num_deaths: int
    last_s: float


class CrashSuspects:
    """Counts, for each request, the engine's deaths that it was in flight at.

    Requests are the same where the tenant, the prompt and the grammar are: so a client's retry, a
    second try of the gateway and each of n choices count as one. Kept are keyed digests, at most
    `max_remembered` of them; the longest unseen are forgotten first. An answer that ends by itself
    takes its request out.
    """

    def __init__(
        self,
        *,
        max_remembered: int = _MAX_REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds."""
        self._max_remembered = max_remembered
        self._clock = clock
        self._key = secrets.token_bytes(_DIGEST_BYTES)
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # the last seen last

    def __len__(self) -> int:
        """Return the number of remembered requests."""
        return len(self._records)

    def check(self, request: EngineRequest) -> None:
        """Raise CrashSuspectError for a request that was in flight at too many deaths."""
        if not self._records:  # always, but for some minutes after a death
            return
        self._forget_expired()
        record = self._records.get(self._digest(request))
        if record is not None and record.num_deaths >= MAX_DEATHS:
            raise CrashSuspectError(retry_after_s=record.last_s + EXPIRES_S - self._clock())

    def note_served(self, request: EngineRequest) -> None:
        """Note that a request was served to its end, so that it cannot be what ends engines."""
        if self._records:
            self._records.pop(self._digest(request), None)

    def note_death(self, requests: Iterable[EngineRequest]) -> list[bool]:
        """Count a death for all requests in flight; for each, whether it has had too many."""
        self._forget_expired()
        now_s = self._clock()
        digests = [self._digest(request) for request in requests]
        for digest in dict.fromkeys(digests):
            before = self._records.pop(digest, None)
            num_deaths = 1 if before is None else before.num_deaths + 1
            self._records[digest] = _Record(num_deaths, now_s)
        had_too_many = [self._records[digest].num_deaths >= MAX_DEATHS for digest in digests]
        while len(self._records) > self._max_remembered:
            self._records.popitem(last=False)
        return had_too_many

    def uncount_death(self, requests: Iterable[EngineRequest]) -> None:
        """Take back a death that was none."""
        for digest in dict.fromkeys(map(self._digest, requests)):
            record = self._records.get(digest)
            if record is not None and record.num_deaths > 1:
                self._records[digest] = replace(record, num_deaths=record.num_deaths - 1)
            else:
                self._records.pop(digest, None)

    def _forget_expired(self) -> None:
        oldest_s = self._clock() - EXPIRES_S
        while self._records and next(iter(self._records.values())).last_s <= oldest_s:
            self._records.popitem(last=False)

    def _digest(self, request: EngineRequest) -> bytes:
        grammar = request.grammar
        said = (
            request.tenant,
            request.cache_salt,
            request.prompt_token_ids,
            None if grammar is None else (grammar.kind, grammar.text),
        )
        encoded = msgspec.msgpack.encode(said)
        return blake2b(encoded, digest_size=_DIGEST_BYTES, key=self._key).digest()
