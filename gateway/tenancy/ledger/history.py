"""Charges of keys before this process began, for limits that are counted in memory."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Row, distinct, func, select

from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import ledger

_MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The charge of one key at one tier, in a stretch of time."""

    at_s: int
    """Its beginning, whole seconds since 1970 (UTC)."""
    key_id: str
    team_id: str | None
    tier: str
    requests: int
    """API requests; one that two tiers were charged for counts at each."""
    tokens: int
    usd_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageHistory:
    """The last minute second by second; this day and this month of UTC as sums."""

    minute: tuple[Used, ...]
    day: tuple[Used, ...]
    month: tuple[Used, ...]


async def usage_history(database: Database, now_s: float) -> UsageHistory:
    """Return the usage that counts at `now_s`, seconds since 1970. Raises StorageError.

    Rows dated later, by a wall clock that was ahead and is set right, count in their own day and
    month only; of the last minute those that are at most a minute ahead.
    """
    return await asyncio.to_thread(_read, database, now_s)


def used_between(
    connection: Connection, since_s: float, until_s: float, *, by_second: bool = False
) -> tuple[Used, ...]:
    """Return the charges of attempts that ended since then and before `until_s`, by key, team and
    tier.

    `by_second`: also by the second of their end; meant for a minute or so.
    """
    is_within = (ledger.c.ended_at >= since_s) & (ledger.c.ended_at < until_s)
    charged = is_within & (ledger.c.num_charged_tokens > 0)
    key = (ledger.c.key_id, ledger.c.team_id, ledger.c.tier)
    if by_second:
        # Databases differ in how they round a fraction to a whole number.
        columns = ("ended_at", "request_id", "num_charged_tokens", "charge_nanos")
        rows = connection.execute(
            select(*key, *(ledger.c[name] for name in columns)).where(charged)
        )
        return _by_second(rows)
    sums = connection.execute(
        select(
            *key,
            func.count(distinct(ledger.c.request_id)),
            func.sum(ledger.c.num_charged_tokens),
            func.sum(ledger.c.charge_nanos),
        )
        .where(charged)
        .group_by(*key)
    )
    return tuple(
        Used(
            at_s=int(since_s),
            key_id=key_id,
            team_id=team_id,
            tier=tier,
            requests=requests,
            tokens=int(tokens),
            usd_nanos=int(usd_nanos),
        )
        for key_id, team_id, tier, requests, tokens, usd_nanos in sums
    )


def used_in_periods(database: Database, now_s: float) -> dict[str, tuple[Used, ...]]:
    """Return the charges of this `day` and this `month` of UTC. Blocks. Raises StorageError."""
    with database.read() as connection:
        return {
            name: used_between(connection, since_s, until_s)
            for name, (since_s, until_s) in _periods(now_s).items()
        }


def _read(database: Database, now_s: float) -> UsageHistory:
    day, month = _periods(now_s).values()
    with database.read() as connection:
        return UsageHistory(
            minute=used_between(
                connection, int(now_s) - _MINUTE_S, now_s + _MINUTE_S, by_second=True
            ),
            day=used_between(connection, *day),
            month=used_between(connection, *month),
        )


def _periods(now_s: float) -> dict[str, tuple[float, float]]:
    """Return the beginnings and ends of this day and this month."""
    now = datetime.fromtimestamp(now_s, UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    tomorrow = midnight + timedelta(days=1)
    first = midnight.replace(day=1)
    next_first = (first + timedelta(days=31)).replace(day=1)
    return {
        "day": (midnight.timestamp(), tomorrow.timestamp()),
        "month": (first.timestamp(), next_first.timestamp()),
    }


def _by_second(rows: Iterable[Row[tuple[object, ...]]]) -> tuple[Used, ...]:
    groups: dict[tuple[int, str, str | None, str], list[Row[tuple[object, ...]]]]
    groups = defaultdict(list)
    for row in rows:
        groups[int(row.ended_at), row.key_id, row.team_id, row.tier].append(row)
    return tuple(
        Used(
            at_s=at_s,
            key_id=key_id,
            team_id=team_id,
            tier=tier,
            requests=len({row.request_id for row in group}),
            tokens=sum(row.num_charged_tokens for row in group),
            usd_nanos=sum(row.charge_nanos for row in group),
        )
        for (at_s, key_id, team_id, tier), group in sorted(
            groups.items(), key=lambda item: item[0][0]
        )
    )
