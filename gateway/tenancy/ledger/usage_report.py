"""Usage as JSON: for /v1/usage and for `outrider usage --json`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.ledger.dimensions import Dimension
from outrider.gateway.tenancy.ledger.queries import (
    Savings,
    UsageFilter,
    UsageTotals,
    names_of,
    savings,
    total_usage,
    usage_by,
)

_Usd = Annotated[float, says("USD.")]
Nanos = Annotated[int, says("Billionths of a USD.")]


class UsageSums(CompleteModel):
    """Sums over attempts. Costs are null for principals that may not read them.

    Cached tokens are part of the prompt's, reasoning and discarded ones of the completion's.
    """

    requests: int
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    held_tokens: int
    discarded_tokens: int
    charged_tokens: int
    charge_usd: _Usd
    charge_nanos: Nanos
    cost_usd: _Usd | None
    cost_nanos: Nanos | None
    cost_usd_per_million_tokens: _Usd | None
    cost_usd_per_million_charged_tokens: _Usd | None


class UsageGroup(UsageSums):
    """The sums of one group. `name` is the name of its key or team."""

    group: str
    name: str | None


class SavingsReport(CompleteModel):
    """The total cost, compared with one tier answering everything."""

    tier: str
    cost_usd: _Usd
    always_usd: _Usd
    saved_usd: _Usd
    saved_share: float | None


class UsageReport(CompleteModel):
    """Usage between two times, seconds since 1970."""

    object: Literal["usage"]
    by: Dimension
    since: float | None
    until: Annotated[float | None, says("Exclusive.")]
    data: list[UsageGroup]
    has_more: Annotated[bool, says("There are more groups than requested.")]
    totals: Annotated[UsageSums, says("Over all groups.")]
    savings: SavingsReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuestion:
    """The question of a usage report. `with_costs`: include our cost and the savings."""

    by: Dimension = "tier"
    wanted: UsageFilter = field(default_factory=UsageFilter)
    limit: int = 1000
    with_costs: bool = False


def usage_report(database: Database, question: UsageQuestion) -> UsageReport:
    """Return the report, of one moment. Blocks. Raises StorageError."""
    wanted = question.wanted
    with database.read() as connection:
        groups = usage_by(connection, question.by, wanted, limit=question.limit + 1)
        totals = total_usage(connection, wanted)
        saved = savings(connection, wanted) if question.with_costs else None
        names = names_of(connection, question.by, [group.group or "" for group in groups])
    return UsageReport(
        object="usage",
        by=question.by,
        since=wanted.since_s,
        until=wanted.until_s,
        data=[
            UsageGroup(
                **_sums(usage, question), group=usage.group or "", name=names.get(usage.group or "")
            )
            for usage in groups[: question.limit]
        ],
        has_more=len(groups) > question.limit,
        totals=UsageSums(**_sums(totals, question)),
        savings=None if saved is None else _savings(saved),
    )


def _sums(usage: UsageTotals, question: UsageQuestion) -> dict[str, Any]:
    """Return the fields of UsageSums."""
    costs: dict[str, float | None] = {
        "cost_usd": _usd(usage.cost_nanos),
        "cost_nanos": usage.cost_nanos,
        "cost_usd_per_million_tokens": usage.cost_per_million,
        "cost_usd_per_million_charged_tokens": usage.cost_per_million_charged,
    }
    return {
        "requests": usage.requests,
        "attempts": usage.attempts,
        **{f"{kind}_tokens": count for kind, count in usage.tokens.items()},
        "charge_usd": _usd(usage.charge_nanos),
        "charge_nanos": usage.charge_nanos,
        **(costs if question.with_costs else dict.fromkeys(costs)),
    }


def _savings(saved: Savings) -> SavingsReport:
    return SavingsReport(
        tier=saved.tier,
        cost_usd=_usd(saved.cost_nanos),
        always_usd=_usd(saved.always_nanos),
        saved_usd=_usd(saved.saved_nanos),
        saved_share=saved.saved_share,
    )


def _usd(nanos: int) -> float:
    return nanos / 10**9
