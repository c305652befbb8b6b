"""The latest requests, in columns: the data of the live page's figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.contract.answers.outcomes import RequestEnding, RequestOutcome
from outrider.gateway.experiments.slo.goodput import attained

WINDOW_S: Final = 300.0
ENDINGS: Final[tuple[RequestEnding, ...]] = get_args(RequestEnding)
UNKNOWN: Final = "none"

_ENDING_CODES: Final = {ending: code for code, ending in enumerate(ENDINGS)}
_CAPACITY: Final = 32_768
_MAX_NAMES: Final = 256
_COLUMNS: Final[dict[str, str]] = {
    "at_s": "f8",
    "owner": "i8",
    "ttft_s": "f8",
    "inter_token_s": "f8",
    "duration_s": "f8",
    "num_tokens": "i8",
    "cost_nanos": "i8",
    "charge_nanos": "i8",
    "ending": "i1",
    "attained": "i1",  # 1 and 0; -1 where a request does not count
    "tier": "i2",
    "slo_class": "i2",
}
Column = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecentRows:
    """Requests that ended in the last `window_s`, the oldest first."""

    now_s: float
    window_s: float
    tiers: tuple[str, ...]
    """The names that the column `tiers` points into."""
    classes: tuple[str, ...]
    """The names that the column `classes` points into."""
    columns: dict[str, Column]
    """All of one length. `at_s`: when a request ended, on the clock of `now_s`. NaN: no such
    latency."""

    def __getitem__(self, name: str) -> Column:
        """Return one column."""
        return self.columns[name]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.columns["at_s"])


class RecentOutcomes:
    """Remembers finished requests: a ring of `capacity`, complete only for `WINDOW_S`.

    Used on one thread; `rows` returns a copy that another may read.
    """

    def __init__(self, *, clock: Callable[[], float], capacity: int = _CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._started_s = clock()
        self._num_seen = 0
        self._table = np.zeros(capacity, list(_COLUMNS.items()))
        self._tiers = _Names()
        self._classes = _Names()

    def observe(self, outcome: RequestOutcome) -> None:
        """Note a request that is over."""
        is_attained = attained(outcome)
        self._table[self._num_seen % self._capacity] = (  # in the order of _COLUMNS
            self._clock(),
            _owner(outcome.team_id or outcome.key_id),
            _number(outcome.ttft_s),
            _number(outcome.inter_token_s),
            outcome.duration_s,
            outcome.num_completion_tokens,
            outcome.cost_nanos,
            outcome.charge_nanos,
            _ENDING_CODES[outcome.ending],
            -1 if is_attained is None else is_attained,
            self._tiers.code(outcome.tier),
            self._classes.code(outcome.slo_class),
        )
        self._num_seen += 1

    def rows(self, tenant: str | None = None) -> RecentRows:
        """Return the window's requests; where given, of one tenant (a team, or a key in none)."""
        now_s = self._clock()
        num_rows = min(self._num_seen, self._capacity)
        first = self._num_seen % self._capacity if num_rows == self._capacity else 0
        at_s = np.roll(self._table["at_s"][:num_rows], -first)
        window_s = min(WINDOW_S, now_s - self._started_s)
        if num_rows == self._capacity:
            window_s = min(window_s, now_s - float(at_s[0]))
        is_wanted = at_s >= now_s - window_s
        if tenant is not None:
            owners = np.roll(self._table["owner"][:num_rows], -first)
            is_wanted &= owners == _owner(tenant)
        return RecentRows(
            now_s=now_s,
            window_s=max(window_s, 1e-3),
            tiers=self._tiers.names,
            classes=self._classes.names,
            columns={
                name: np.roll(self._table[name][:num_rows], -first)[is_wanted] for name in _COLUMNS
            },
        )


def joined(parts: Sequence[RecentRows]) -> RecentRows:
    """Return the requests of several processes on one machine as those of one.

    The window is the longest one: of a process that was started lately, fewer requests are known.
    """
    tiers, classes = _Names(), _Names()
    columns: dict[str, list[Column]] = {name: [] for name in _COLUMNS}
    for part in parts:
        own = {
            "tier": np.array([tiers.code(name) for name in part.tiers], "i2")[part["tier"]],
            "slo_class": np.array([classes.code(name) for name in part.classes], "i2")[
                part["slo_class"]
            ],
        }
        for name, found in columns.items():
            found.append(own.get(name, part[name]))
    whole = {name: np.concatenate(found) for name, found in columns.items()}
    order = np.argsort(whole["at_s"], kind="stable")
    return RecentRows(
        now_s=max(part.now_s for part in parts),
        window_s=max(part.window_s for part in parts),
        tiers=tiers.names,
        classes=classes.names,
        columns={name: column[order] for name, column in whole.items()},
    )


class _Names:
    """Numbers for names; beyond 256 different ones all get that of `UNKNOWN`."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {UNKNOWN: 0}

    def code(self, name: str) -> int:
        """Return the name's number."""
        code = self._codes.get(name or UNKNOWN)
        if code is None:
            code = len(self._codes) if len(self._codes) < _MAX_NAMES else 0
            if code:
                self._codes[name] = code
        return code

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by number."""
        return tuple(self._codes)


def _owner(tenant: str) -> int:
    # Keyed anew in each process, and 64 bits wide: no client can compute another's.
    return hash(tenant)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
