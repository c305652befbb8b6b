"""Usual lengths of answers: the reservation for requests that set no maximum."""

import math
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Final

_SHARE: Final = 0.95
_NUM_WINDOW: Final = 512
_MIN_SAMPLES: Final = 20
_MAX_KINDS: Final = 1024


class AnswerLengths:
    """The 95th percentile of the last 512 answers' tokens, by tier and endpoint.

    Below 20 answers, `default_tokens`. An answer that outgrows its reservation reserves more, so a
    wrong estimate costs time but no text. Thread-safe; some microseconds a call.
    """

    def __init__(self, *, default_tokens: int = 1024) -> None:
        self._default_tokens = default_tokens
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Lengths] = {}

    def expected(self, tier: str, endpoint: str, *, at_most: int) -> int:
        """Return the tokens to reserve for an answer of `at_most` tokens; at least 1."""
        with self._lock:
            lengths = self._kinds.get((tier, endpoint))
            quantile = lengths.quantile() if lengths is not None else None
        return max(1, min(at_most, self._default_tokens if quantile is None else quantile))

    def learn(self, tier: str, endpoint: str, num_tokens: int, *, was_cut: bool = False) -> None:
        """Add the length of an answer. `was_cut`: it would have been at least this long.

        Answers that were cut count from the percentile on: below it they carry no information, and
        counting them would make the reservations, and with them the next answers, ever shorter.
        """
        with self._lock:
            lengths = self._kinds.get((tier, endpoint))
            if lengths is None:
                if len(self._kinds) >= _MAX_KINDS:
                    del self._kinds[next(iter(self._kinds))]
                lengths = self._kinds[(tier, endpoint)] = _Lengths()
            if was_cut and num_tokens < (lengths.quantile() or self._default_tokens):
                return
            lengths.add(num_tokens)

    @property
    def num_kinds(self) -> int:
        """Return the number of pairs of tier and endpoint kept; the oldest are forgotten."""
        return len(self._kinds)


class _Lengths:
    """The last answers of one kind, in order of arrival and sorted."""

    __slots__ = ("_arrived", "_sorted")

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, num_tokens: int) -> None:
        self._arrived.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._arrived) > _NUM_WINDOW:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]

    def quantile(self) -> int | None:
        """Return the length that 95 of 100 do not exceed; None below 20 samples."""
        count = len(self._sorted)
        if count < _MIN_SAMPLES:
            return None
        return self._sorted[math.ceil(_SHARE * count) - 1]
