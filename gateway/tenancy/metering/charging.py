"""The charge of a request's attempts, kept within the request's reservation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from outrider.gateway.tenancy.keys.amounts import Amounts
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.metering.rows import Entry

NONE: Final = Amounts(requests=0)


def priced(entry: Entry, prices: PriceBook) -> LedgerRow:
    """Return the row with its cost and its charge to the client."""
    row, charged = entry.row, entry.charged
    # A drafted token is a row of a verifying pass, and costs as much as a written token.
    num_written = row.num_completion_tokens or (
        row.num_computed_tokens if row.kind == "draft" else 0
    )
    cost = prices.money(
        row.tier,
        num_prompt_tokens=row.num_prompt_tokens,
        num_cached_tokens=row.num_cached_tokens,
        num_completion_tokens=num_written,
        units=entry.units,
    )
    num_cached = min(charged.num_cached, charged.num_prompt)
    worked = (row.num_prompt_tokens, row.num_cached_tokens, num_written, entry.units)
    charge = cost
    if worked != (charged.num_prompt, num_cached, charged.num_completion, charged.units):
        charge = prices.money(
            row.tier,
            num_prompt_tokens=charged.num_prompt,
            num_cached_tokens=num_cached,
            num_completion_tokens=charged.num_completion,
            units=charged.units,
            of_prompt=row.num_prompt_tokens,
        )
    return msgspec.structs.replace(
        row,
        cost_nanos=0 if row.kind == "cached" else cost.cost_nanos,
        charge_nanos=charge.charge_nanos,
        num_charged_tokens=charged.num_prompt + charged.num_completion,
        price_version=prices.version,
    )


@dataclass(slots=True)
class Reserved:
    """The amounts reserved by a request: of each tier's limits, and of all tiers together."""

    by_tier: dict[str, Amounts]
    most: Amounts

    def add(self, more: Mapping[str, Amounts]) -> None:
        """Grow by the largest of these amounts and by each tier's own."""
        for tier, amounts in more.items():
            self.by_tier[tier] = plus(self.by_tier.get(tier, NONE), amounts)
        self.most = plus(self.most, largest(more.values()))


def plus(one: Amounts, other: Amounts) -> Amounts:
    """Return the sum of both."""
    if one is NONE:
        return other
    return Amounts(
        requests=one.requests + other.requests,
        tokens=one.tokens + other.tokens,
        usd_nanos=one.usd_nanos + other.usd_nanos,
    )


def beyond(one: Amounts, other: Amounts) -> Amounts:
    """Return by how much the first amounts exceed the second, each amount by itself."""
    return Amounts(
        requests=max(one.requests - other.requests, 0),
        tokens=max(one.tokens - other.tokens, 0),
        usd_nanos=max(one.usd_nanos - other.usd_nanos, 0),
    )


def largest(amounts: Iterable[Amounts]) -> Amounts:
    """Return the larger of each amount."""
    amounts = tuple(amounts)
    if len(amounts) == 1:  # by far the most requests
        return amounts[0]
    return Amounts(
        requests=max((a.requests for a in amounts), default=0),
        tokens=max((a.tokens for a in amounts), default=0),
        usd_nanos=max((a.usd_nanos for a in amounts), default=0),
    )


def used(rows: Iterable[LedgerRow]) -> dict[str, Amounts]:
    """Return the charged amounts by tier; the request itself counts for the first one."""
    found: dict[str, Amounts] = {}
    for row in rows:
        if _is_charged(row):
            taken = Amounts(
                requests=0 if found else 1,
                tokens=row.num_charged_tokens,
                usd_nanos=row.charge_nanos,
            )
            found[row.tier] = plus(found.get(row.tier, NONE), taken)
    return found


def _is_charged(row: LedgerRow) -> bool:
    """Return whether the client pays for it: an image may have a price and no tokens."""
    return bool(row.num_charged_tokens or row.charge_nanos)


def missing(rows: Sequence[LedgerRow], reserved: Reserved) -> dict[str, Amounts]:
    """Return the amounts to reserve in addition so that all rows can be charged."""
    wanted = used(rows)
    if not wanted:
        return {}
    more = {
        tier: _to_pay(amounts, reserved.by_tier.get(tier, NONE)) for tier, amounts in wanted.items()
    }
    together = NONE
    for amounts in wanted.values():
        together = plus(together, amounts)
    over = _to_pay(together, reserved.most)
    if over is NONE and all(amounts is NONE for amounts in more.values()):
        return {}
    last = next(reversed(more))
    more[last] = largest((more[last], over))
    return {tier: amounts for tier, amounts in more.items() if amounts != NONE}


def _to_pay(amounts: Amounts, held: Amounts) -> Amounts:
    """Return the tokens and the money beyond what is held."""
    if amounts.tokens <= held.tokens and amounts.usd_nanos <= held.usd_nanos:
        return NONE
    return Amounts(
        requests=0,
        tokens=max(amounts.tokens - held.tokens, 0),
        usd_nanos=max(amounts.usd_nanos - held.usd_nanos, 0),
    )


def capped(rows: Sequence[LedgerRow], reserved: Reserved) -> list[LedgerRow]:
    """Return the rows, charged with no more than is reserved; the rest is ours to pay."""
    left, most, kept = dict(reserved.by_tier), reserved.most, []
    for row in rows:
        if _is_charged(row):
            here = left.get(row.tier, NONE)
            row = msgspec.structs.replace(
                row,
                num_charged_tokens=min(row.num_charged_tokens, here.tokens, most.tokens),
                charge_nanos=min(row.charge_nanos, here.usd_nanos, most.usd_nanos),
            )
            taken = Amounts(requests=0, tokens=row.num_charged_tokens, usd_nanos=row.charge_nanos)
            left[row.tier], most = beyond(here, taken), beyond(most, taken)
        kept.append(row)
    return kept
