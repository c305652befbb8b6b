"""Metrics of the ledger: rows, money, and whether they reach the database."""

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.gateway.tenancy.ledger.row import LedgerRow

_NANOS_PER_USD = 10**9


class LedgerMetrics:
    """The ledger's instruments. Rows are counted when they reach the journal."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = Counter(
            "outrider_ledger_rows", "Attempts.", ["kind", "outcome"], registry=registry
        )
        self._cost = Counter(
            "outrider_cost_usd", "Cost of attempts to the operator.", ["tier"], registry=registry
        )
        self._charge = Counter(
            "outrider_charge_usd", "Charges to clients.", ["tier"], registry=registry
        )
        self._pending = Gauge(
            "outrider_ledger_pending_rows", "Rows not in the database yet.", registry=registry
        )
        self._failures = Counter(
            "outrider_ledger_write_failures", "Writes that failed.", ["place"], registry=registry
        )
        self._dropped = Counter(
            "outrider_ledger_dropped_rows",
            "Rows that could not be stored anywhere and are lost.",
            registry=registry,
        )
        for place in ("journal", "database"):
            self._failures.labels(place)

    def taken(self, rows: Sequence[LedgerRow]) -> None:
        """Count new rows and their money."""
        for (kind, outcome), count in Tally((row.kind, row.outcome) for row in rows).items():
            self._rows.labels(kind, outcome).inc(count)
        costs, charges = Tally[str](), Tally[str]()
        for row in rows:
            costs[row.tier] += row.cost_nanos
            charges[row.tier] += row.charge_nanos
        for tier in costs:
            self._cost.labels(tier).inc(max(0, costs[tier]) / _NANOS_PER_USD)
            self._charge.labels(tier).inc(max(0, charges[tier]) / _NANOS_PER_USD)

    def pending(self, num_rows: int) -> None:
        """Set how many rows wait for the database now."""
        self._pending.set(num_rows)

    def failed(self, place: str) -> None:
        """Count a write that failed, of `journal` or `database`."""
        self._failures.labels(place).inc()

    def dropped(self, num_rows: int) -> None:
        """Count rows that neither the journal nor the database nor the memory could take."""
        self._dropped.inc(num_rows)
