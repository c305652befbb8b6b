"""Rows of a ledger to ask about."""

from collections.abc import Sequence

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.ledger.storing import RowStore
from tests.gateway.tenancy.ledger.ledgers import NOON, row

DAY_S = 86_400


PRICES = PriceBook.from_settings(
    load_settings(
        flags={
            "routing.prices.small.prompt": 0.1,
            "routing.prices.small.completion": 0.4,
            "routing.prices.large.prompt": 1,
            "routing.prices.large.cached_prompt": 0.5,
            "routing.prices.large.completion": 4,
        },
        environ={},
    )
)


def store(database: Database, rows: Sequence[LedgerRow], prices: PriceBook | None = None) -> None:
    def refuse(row: LedgerRow, reason: str) -> None:
        raise AssertionError(reason)

    writer = RowStore(database, refuse)
    writer.store(rows)
    if prices is not None:
        writer.store_prices(prices, NOON)


def some_rows() -> list[LedgerRow]:
    """Two keys; a request that escalated, one that was drafted for, one that failed."""
    one = {"key_id": "one", "team_id": "red", "price_version": PRICES.version}
    return [
        row(1, **one, model="auto", cost_nanos=14_000, charge_nanos=20_000),
        row(2, **one, request_id="e", outcome="escalated", num_discarded_tokens=10,
            num_charged_tokens=0, cost_nanos=14_000),
        row(3, **one, request_id="e", kind="escalation", tier="large", num_cached_tokens=40,
            num_completion_tokens=20, num_charged_tokens=120, cost_nanos=160_000,
            charge_nanos=200_000),
        row(4, **one, request_id="e", kind="draft", num_charged_tokens=0, cost_nanos=1_000),
        row(5, key_id="two", price_version=PRICES.version, outcome="failed", num_charged_tokens=0,
            num_completion_tokens=0, cost_nanos=10_000),
        row(6, key_id="two", ended_at=NOON + DAY_S, price_version=PRICES.version,
            cost_nanos=14_000, charge_nanos=14_000),
        row(7, key_id="two", ended_at=NOON + DAY_S, request_id=row(6).request_id, kind="mirror",
            tier="cloud", num_charged_tokens=0, cost_nanos=999_000),
    ]  # fmt: skip
