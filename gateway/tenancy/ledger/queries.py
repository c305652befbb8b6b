"""Sums over the ledger: usage and cost by key, team, tier and time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, and_, case, distinct, func, or_, select

from outrider.gateway.storage.tables import keys, ledger, price_versions, teams
from outrider.gateway.tenancy.ledger.dimensions import Dimension
from outrider.gateway.tenancy.ledger.prices import PriceBook

TOKENS: Final = (
    "prompt", "cached", "computed", "completion", "reasoning", "drafted", "accepted", "held",
    "discarded", "charged",
)  # fmt: skip
"""Kinds of tokens in a row of the ledger."""

_COLUMNS: Final[Mapping[Dimension, ColumnElement[Any]]] = {
    "key": ledger.c.key_id,
    "team": ledger.c.team_id,
    "tier": ledger.c.tier,
    "model": ledger.c.model,
    "day": ledger.c.day,
    "kind": ledger.c.kind,
    "outcome": ledger.c.outcome,
    "end_user": ledger.c.end_user,
}
_SERVING: Final = ("answer", "escalation", "retry", "hedge", "continuation", "cached")
"""Kinds of attempts at the client's request; others speed up answers or collect data."""
_DELIVERED: Final = ("answered", "cancelled", "limited")
"""Outcomes in which the client received the answer or its beginning."""
_EPOCH: Final = date(1970, 1, 1)
_TOKENS_PER_NANO: Final = 1_000_000 / 10**9
"""Nano-dollars per token, in USD per million tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Selects rows. None: all; times are seconds since 1970."""

    since_s: float | None = None
    until_s: float | None = None
    """Exclusive."""
    key_ids: Sequence[str] | None = None
    team_ids: Sequence[str] | None = None
    tier: str | None = None
    model: str | None = None
    end_user: str | None = None
    only_charged: bool = False
    """Only rows that the client pays for, and answers of the response cache."""

    @property
    def condition(self) -> ColumnElement[bool]:
        """Return the same condition for SQL."""
        parts: list[ColumnElement[bool]] = []
        if self.since_s is not None:
            parts.append(ledger.c.ended_at >= self.since_s)
        if self.until_s is not None:
            parts.append(ledger.c.ended_at < self.until_s)
        if self.key_ids is not None:
            parts.append(ledger.c.key_id.in_(self.key_ids))
        if self.team_ids is not None:
            parts.append(ledger.c.team_id.in_(self.team_ids))
        words = {"tier": self.tier, "model": self.model, "end_user": self.end_user}
        parts.extend(ledger.c[name] == word for name, word in words.items() if word is not None)
        if self.only_charged:
            is_charged = (ledger.c.num_charged_tokens > 0) | (ledger.c.charge_nanos > 0)
            parts.append(is_charged | (ledger.c.kind == "cached"))
        return and_(True, *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums of a group of rows."""

    group: str | None
    """None for all rows, "" for rows that have no such word."""
    requests: int
    """API requests."""
    attempts: int
    """Rows."""
    tokens: Mapping[str, int]
    """Has the kinds of `TOKENS`."""
    cost_nanos: int
    charge_nanos: int

    @property
    def cost_per_million(self) -> float | None:
        """Return our cost of a million tokens in USD, prompts and answers; None without tokens."""
        return _per_million(self.cost_nanos, self.tokens["prompt"] + self.tokens["completion"])

    @property
    def cost_per_million_charged(self) -> float | None:
        """Return the whole cost, unbilled tokens included, per million billed tokens."""
        return _per_million(self.cost_nanos, self.tokens["charged"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The cost, and the cost if one tier (`tier`) had answered everything.

    Only requests of times in which that tier's price was known. Mirrors are left out: no answer
    needs them.
    """

    tier: str
    cost_nanos: int
    always_nanos: int

    @property
    def saved_nanos(self) -> int:
        """Return the saved amount; below 0 where the one tier would have been cheaper."""
        return self.always_nanos - self.cost_nanos

    @property
    def saved_share(self) -> float | None:
        """Return the saved share of the one tier's cost; None where that cost is 0."""
        return self.saved_nanos / self.always_nanos if self.always_nanos else None


def usage_by(
    connection: Connection, by: Dimension, wanted: UsageFilter, *, limit: int
) -> list[UsageTotals]:
    """Return at most `limit` groups: days in order, others by charge, cost and requests."""
    column = _COLUMNS[by]
    sums = _sums()
    order = [column] if by == "day" else [sums[-1].desc(), sums[-2].desc(), sums[0].desc(), column]
    rows = connection.execute(
        select(column, *sums).where(wanted.condition).group_by(column).order_by(*order).limit(limit)
    )
    return [_usage(_label(by, row[0]), row[1:]) for row in rows]


def total_usage(connection: Connection, wanted: UsageFilter) -> UsageTotals:
    """Return the sums over all rows."""
    return _usage(None, connection.execute(select(*_sums()).where(wanted.condition)).one())


def savings(connection: Connection, wanted: UsageFilter) -> Savings | None:
    """Compare with one tier that answers everything; None where its price is unknown."""
    books = price_books(connection)
    lengths = set[int]().union(*(b.prompt_thresholds(b.strong_tier) for b in books.values()))
    cost = always = 0
    tier: str | None = None
    for version, longest, spent, prompt, cached, completion in connection.execute(
        _delivered_query(wanted, sorted(lengths))
    ):
        book = books.get(version)
        if book is None or not book.is_known(book.strong_tier):
            continue
        tier = book.strong_tier
        cost += int(spent)
        always += book.money(
            tier,
            num_prompt_tokens=int(prompt),
            num_cached_tokens=int(cached),
            num_completion_tokens=max(0, int(completion)),
            of_prompt=int(longest),
        ).cost_nanos
    return None if tier is None else Savings(tier=tier, cost_nanos=cost, always_nanos=always)


def names_of(connection: Connection, by: Dimension, ids: Iterable[str]) -> dict[str, str]:
    """Return the names of the keys or teams with these ids, without deleted ones."""
    if by not in ("key", "team"):
        return {}
    table = keys if by == "key" else teams
    rows = connection.execute(select(table.c.id, table.c.name).where(table.c.id.in_(list(ids))))
    return {row.id: row.name for row in rows}


def ids_of(connection: Connection, by: Literal["key", "team"], word: str) -> list[str]:
    """Return the ids of keys or teams with this name or id; else the given text."""
    table = keys if by == "key" else teams
    found = select(table.c.id).where(or_(table.c.id == word, table.c.name == word))
    return list(connection.execute(found).scalars()) or [word]


def _sums() -> list[ColumnElement[Any]]:
    """Select requests, attempts, tokens by kind, cost, charge."""
    tokens = (func.sum(ledger.c[f"num_{kind}_tokens"]) for kind in TOKENS)
    return [
        func.count(distinct(ledger.c.request_id)),
        func.count(),
        *tokens,
        func.sum(ledger.c.cost_nanos),
        func.sum(ledger.c.charge_nanos),
    ]


def _usage(group: str | None, sums: Sequence[Any]) -> UsageTotals:
    numbers = [int(number or 0) for number in sums]  # without a row, sums are null
    return UsageTotals(
        group=group,
        requests=numbers[0],
        attempts=numbers[1],
        tokens=dict(zip(TOKENS, numbers[2:-2], strict=True)),
        cost_nanos=numbers[-2],
        charge_nanos=numbers[-1],
    )


def _label(by: Dimension, value: Any) -> str:
    if by == "day":
        return (_EPOCH + timedelta(days=value)).isoformat()
    return "" if value is None else str(value)


def _delivered_query(wanted: UsageFilter, lengths: Sequence[int]) -> Any:
    """Select the longest prompt, the cost, and the tokens of prompts and of delivered text.

    They are sums by version of prices and by which of the `lengths` a row's prompt exceeds: all
    rows of a group have the price of its longest prompt. A prompt counts once for each request:
    not for attempts that delivered nothing, and not for continuations, whose prompt contains the
    text delivered before.
    """
    row = ledger.c
    text = row.num_completion_tokens - row.num_discarded_tokens
    is_serving = row.kind.in_(_SERVING) & (row.outcome != "lost")
    has_prompt = (
        is_serving & (row.kind != "continuation") & (row.outcome.in_(_DELIVERED) | (text > 0))
    )
    return (
        select(
            row.price_version,
            func.max(row.num_prompt_tokens),
            func.sum(case((row.kind != "mirror", row.cost_nanos), else_=0)),
            func.sum(case((has_prompt, row.num_prompt_tokens), else_=0)),
            func.sum(case((has_prompt, row.num_cached_tokens), else_=0)),
            func.sum(case((is_serving, text), else_=0)),
        )
        .where(wanted.condition)
        .group_by(row.price_version, *(row.num_prompt_tokens > length for length in lengths))
        .order_by(func.max(row.ended_at))
    )


def price_books(connection: Connection) -> dict[str, PriceBook]:
    """Return the prices of each version that the ledger has had."""
    rows = connection.execute(select(price_versions.c.version, price_versions.c.document))
    return {version: PriceBook.from_document(document.encode()) for version, document in rows}


def _per_million(nanos: int, num_tokens: int) -> float | None:
    return nanos / num_tokens * _TOKENS_PER_NANO if num_tokens else None
