"""Charges of keys before this process began, for limits that are counted in memory."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, distinct, func, select

from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import keys, ledger, teams
from outrider.gateway.tenancy.keys.amounts import PastUse, PastUses
from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX
from outrider.gateway.tenancy.ledger.row import DAY_S

_MINUTE_S = 60
_LONGEST_DAYS = 30
"""Days that a limit can count, the present one included."""
_MAX_END_USER_DAYS = 200_000

_SUMS = (
    func.count(distinct(ledger.c.request_id)).label("requests"),
    func.sum(ledger.c.num_charged_tokens).label("tokens"),
    func.sum(ledger.c.charge_nanos).label("usd_nanos"),
)


async def usage_history(database: Database, now_s: float) -> PastUses:
    """Return the usage that counts at `now_s`, seconds since 1970. Raises StorageError.

    Rows dated later, by a wall clock that was ahead and is set right, count in their own day and
    month only; of the last minute those that are at most a minute ahead.
    """
    return await asyncio.to_thread(_read, database, now_s)


def used_each_second(connection: Connection, since_s: float, until_s: float) -> tuple[PastUse, ...]:
    """Return the charges of attempts by the second of their end, key, tier and end user.

    Of those that ended since then and before `until_s`; meant for a minute or so.
    """
    # Databases differ in how they round a fraction to a whole number.
    names = (
        "ended_at", "request_id", "key_id", "team_id", "tier", "end_user", "num_charged_tokens",
        "charge_nanos",
    )  # fmt: skip
    rows = connection.execute(
        select(*(ledger.c[name] for name in names)).where(_charged(since_s, until_s))
    )
    return _by_second(rows)


def used_each_day(connection: Connection, since_s: float, until_s: float) -> tuple[PastUse, ...]:
    """Return the charges of attempts that ended since then and before `until_s`.

    By the day of their end, the oldest first, by key, team and tier.
    """
    query = _each_day(since_s, until_s, ledger.c.tier).order_by(ledger.c.day)
    return tuple(
        _of_day(row, key_id=row.key_id, team_id=row.team_id, tier=row.tier)
        for row in connection.execute(query)
    )


def end_users_each_day(
    connection: Connection, since_s: float, until_s: float
) -> tuple[PastUse, ...]:
    """Return the same by end user, of keys and teams with limits for them; others have no name."""
    of_keys, of_teams = _limiting(connection, keys), _limiting(connection, teams)
    query = _each_day(since_s, until_s, ledger.c.end_user).where(
        ledger.c.key_id.in_(of_keys) | ledger.c.team_id.in_(of_teams)
    )
    dearest = query.order_by(_SUMS[-1].desc(), _SUMS[0].desc()).limit(_MAX_END_USER_DAYS)
    return tuple(
        _of_day(
            row,
            key_id=row.key_id if _is_told(row.key_id, of_keys) else "",
            team_id=row.team_id if row.team_id in of_teams else None,
            tier="",
            end_user=row.end_user,
        )
        for row in connection.execute(dearest)
    )


def past_days(database: Database, now_s: float) -> PastUses:
    """Return only the days that limits of keys and teams count. Blocks. Raises StorageError."""
    with database.read() as connection:
        return PastUses(days=used_each_day(connection, *_counted(now_s)))


def _each_day(since_s: float, until_s: float, column: ColumnElement[str]) -> Select[Any]:
    key = (ledger.c.day, ledger.c.key_id, ledger.c.team_id, column)
    return select(*key, *_SUMS).where(_charged(since_s, until_s)).group_by(*key)


def _of_day(row: Row[Any], **who: Any) -> PastUse:
    return PastUse(
        at_s=row.day * DAY_S,
        requests=row.requests,
        tokens=int(row.tokens),
        usd_nanos=int(row.usd_nanos),
        **who,
    )


def _is_told(key_id: str, limiting: set[str]) -> bool:
    """Return whether whom a row counts for depends on its key."""
    return key_id in limiting or key_id.startswith(SIGNED_IN_PREFIX)


def _limiting(connection: Connection, table: Table) -> set[str]:
    """Return the ids of keys or teams that limit their end users."""
    rows = connection.execute(
        select(table.c.id, table.c.limits).where(table.c.limits.contains('"end_user"'))
    )
    return {owner for owner, _ in rows}


def _charged(since_s: float, until_s: float) -> ColumnElement[bool]:
    is_within = (ledger.c.ended_at >= since_s) & (ledger.c.ended_at < until_s)
    return is_within & (ledger.c.num_charged_tokens > 0)


def _read(database: Database, now_s: float) -> PastUses:
    since_s, until_s = _counted(now_s)
    with database.read() as connection:
        return PastUses(
            minute=used_each_second(connection, int(now_s) - _MINUTE_S, now_s + _MINUTE_S),
            days=used_each_day(connection, since_s, until_s),
            end_user_days=end_users_each_day(connection, since_s, until_s),
        )


def _counted(now_s: float) -> tuple[float, float]:
    """Return the beginning of the days that a limit can count, and the end of the last one."""
    now = datetime.fromtimestamp(now_s, UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    first = min(midnight.replace(day=1), midnight - timedelta(days=_LONGEST_DAYS - 1))
    return first.timestamp(), (midnight + timedelta(days=1)).timestamp()


def _by_second(rows: Iterable[Row[tuple[object, ...]]]) -> tuple[PastUse, ...]:
    groups: dict[tuple[int, str, str | None, str, str], list[Row[tuple[object, ...]]]]
    groups = defaultdict(list)
    for row in rows:
        name = (int(row.ended_at), row.key_id, row.team_id, row.tier, row.end_user)
        groups[name].append(row)
    return tuple(
        PastUse(
            at_s=at_s,
            key_id=key_id,
            team_id=team_id,
            tier=tier,
            end_user=end_user,
            requests=len({row.request_id for row in group}),
            tokens=sum(row.num_charged_tokens for row in group),
            usd_nanos=sum(row.charge_nanos for row in group),
        )
        for (at_s, key_id, team_id, tier, end_user), group in sorted(
            groups.items(), key=lambda item: item[0][0]
        )
    )
