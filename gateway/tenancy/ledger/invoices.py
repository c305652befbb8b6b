"""Invoices: what clients owe by month, with the prices as they were."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, distinct, func, select

from outrider.gateway.storage.tables import keys, ledger, teams
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.queries import UsageFilter, price_books

InvoiceGroup = Literal["team", "key", "end_user"]

_EPOCH: Final = date(1970, 1, 1)
_COLUMNS: Final[dict[InvoiceGroup, dict[str, ColumnElement[Any]]]] = {
    "team": {"team": ledger.c.team_id, "team_name": teams.c.name},
    "key": {"key": ledger.c.key_id, "key_name": keys.c.name},
    "end_user": {"end_user": ledger.c.end_user},
}
_PRICES: Final = {"tier": ledger.c.tier, "price_version": ledger.c.price_version}
_SUMS: Final[dict[str, ColumnElement[Any]]] = {
    "requests": func.count(distinct(ledger.c.request_id)),
    "prompt_tokens": func.sum(ledger.c.num_prompt_tokens),
    "cached_tokens": func.sum(ledger.c.num_cached_tokens),
    "completion_tokens": func.sum(ledger.c.num_completion_tokens),
    "charged_tokens": func.sum(ledger.c.num_charged_tokens),
    "charge_nanos": func.sum(ledger.c.charge_nanos),
}


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """The charge for one tier's tokens at one version of the prices, in one month of UTC.

    Fields that the lines are not grouped by are null. Prices are those of requests without a long
    prompt, in USD per million tokens; null where the database does not know the version.
    """

    month: str
    team: str | None = None
    team_name: str | None = None
    key: str | None = None
    key_name: str | None = None
    end_user: str | None = None
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
    named = ledger.outerjoin(teams, ledger.c.team_id == teams.c.id)
    named = named.outerjoin(keys, ledger.c.key_id == keys.c.id)
    by = {name: column for group in groups for name, column in _COLUMNS[group].items()} | _PRICES
    columns = [column.label(name) for name, column in (by | _SUMS).items()]
    query = select(*columns).select_from(named).group_by(*by.values()).order_by(*by.values())
    for month in _months(connection, wanted):
        since_s, until_s = month_bounds(month)
        is_within = (ledger.c.ended_at >= since_s) & (ledger.c.ended_at < until_s)
        for row in connection.execute(query.where(wanted.condition, is_within)).mappings():
            yield _line(month, row, books)


def _months(connection: Connection, wanted: UsageFilter) -> list[str]:
    days = connection.execute(select(ledger.c.day).where(wanted.condition).distinct()).scalars()
    return sorted({(_EPOCH + timedelta(days=day)).strftime("%Y-%m") for day in days})


def _line(month: str, row: RowMapping, books: dict[str, PriceBook]) -> InvoiceLine:
    found: dict[str, Any] = {name: int(row[name]) if name in _SUMS else row[name] for name in row}
    book = books.get(row["price_version"])
    price = None if book is None else book.charge_of(row["tier"])
    dollars, nanos = divmod(found["charge_nanos"], NANOS_PER_USD)
    return InvoiceLine(
        month=month,
        **found,
        prompt_usd_per_million=None if price is None else price.prompt,
        cached_prompt_usd_per_million=None if price is None else price.cached,
        completion_usd_per_million=None if price is None else price.completion,
        charge_usd=f"{dollars}.{nanos:09d}",
    )
