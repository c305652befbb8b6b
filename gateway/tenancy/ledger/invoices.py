"""Invoices: what clients owe by month, with the prices as they were."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, distinct, func, select

from outrider.gateway.storage.tables import keys, ledger, teams
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.queries import UsageFilter, price_books

InvoiceGroup = Literal["team", "key", "end_user"]

_EPOCH: Final = date(1970, 1, 1)
_COLUMNS: Final[dict[InvoiceGroup, ColumnElement[Any]]] = {
    "team": ledger.c.team_id,
    "key": ledger.c.key_id,
    "end_user": ledger.c.end_user,
}


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """The charge for one tier's tokens at one version of the prices, in one month of UTC.

    Fields that the lines are not grouped by are null. Prices are those of requests without a long
    prompt, in USD per million tokens; null where the database does not know the version.
    """

    month: str
    team: str | None
    team_name: str | None
    key: str | None
    key_name: str | None
    end_user: str | None
    tier: str
    price_version: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charged_tokens: int
    prompt_usd_per_million: float | None
    cached_prompt_usd_per_million: float | None
    completion_usd_per_million: float | None
    charge_usd: str
    """An exact decimal number."""
    charge_nanos: int


def month_bounds(month: str) -> tuple[float, float]:
    """Return the beginning and the end of `2026-01`, seconds since 1970 (UTC).

    Raises ValueError for another text.
    """
    first = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    following = (first + timedelta(days=31)).replace(day=1)
    return first.timestamp(), following.timestamp()


def invoice_lines(
    connection: Connection, groups: Sequence[InvoiceGroup], wanted: UsageFilter
) -> Iterator[InvoiceLine]:
    """Yield a line for each month, group, tier and version of the prices, month by month."""
    wanted = replace(wanted, only_charged=True)
    books = price_books(connection)
    names = {
        "team": _names(connection, "team") if "team" in groups else {},
        "key": _names(connection, "key") if "key" in groups else {},
    }
    for month in _months(connection, wanted):
        for row in _month_rows(connection, groups, month, wanted):
            of_group = dict(zip(groups, row[: len(groups)], strict=True))
            yield _line(month, of_group, names, row[len(groups) :], books)


def _names(connection: Connection, group: Literal["team", "key"]) -> dict[str, str]:
    table = teams if group == "team" else keys
    return {row.id: row.name for row in connection.execute(select(table.c.id, table.c.name))}


def _months(connection: Connection, wanted: UsageFilter) -> list[str]:
    days = connection.execute(select(ledger.c.day).where(wanted.condition).distinct()).scalars()
    return sorted({(_EPOCH + timedelta(days=day)).strftime("%Y-%m") for day in days})


def _month_rows(
    connection: Connection, groups: Sequence[InvoiceGroup], month: str, wanted: UsageFilter
) -> Iterator[Sequence[Any]]:
    since_s, until_s = month_bounds(month)
    by = [*(_COLUMNS[group] for group in groups), ledger.c.tier, ledger.c.price_version]
    row = ledger.c
    counted = (
        row.num_prompt_tokens, row.num_cached_tokens, row.num_completion_tokens,
        row.num_charged_tokens, row.charge_nanos,
    )  # fmt: skip
    query = select(*by, func.count(distinct(row.request_id)), *map(func.sum, counted))
    is_within = (row.ended_at >= since_s) & (row.ended_at < until_s)
    yield from connection.execute(
        query.where(wanted.condition, is_within).group_by(*by).order_by(*by)
    )


def _line(
    month: str,
    of_group: dict[InvoiceGroup, str | None],
    names: dict[str, dict[str, str]],
    sums: Sequence[Any],
    books: dict[str, PriceBook],
) -> InvoiceLine:
    tier, version, *numbers = sums
    requests, prompt, cached, completion, charged, nanos = map(int, numbers)
    price = books[version].charge_of(tier) if version in books else None
    return InvoiceLine(
        month=month,
        team=of_group.get("team"),
        team_name=names["team"].get(of_group.get("team") or ""),
        key=of_group.get("key"),
        key_name=names["key"].get(of_group.get("key") or ""),
        end_user=of_group.get("end_user"),
        tier=tier,
        price_version=version,
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        charged_tokens=charged,
        prompt_usd_per_million=None if price is None else price.prompt,
        cached_prompt_usd_per_million=None if price is None else price.cached,
        completion_usd_per_million=None if price is None else price.completion,
        charge_usd=f"{nanos // NANOS_PER_USD}.{nanos % NANOS_PER_USD:09d}",
        charge_nanos=nanos,
    )
