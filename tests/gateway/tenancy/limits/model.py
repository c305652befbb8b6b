"""Limits as their documentation says them, slowly: what the fast ones are compared with."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from outrider.gateway.tenancy.keys.amounts import Amounts, LimitSpec, Want
from outrider.gateway.tenancy.keys.keys import Principal

Name = tuple[str, str, str | None, str]
"""Scope, owner, tier or None for all, and the limit's name."""


@dataclass
class Entry:
    """An amount that was entered at a time. Parts of it may have been given back."""

    at_s: float
    amount: int


@dataclass
class Held:
    """The entries of one request in each limit, oldest first."""

    principal: Principal
    overall: Amounts
    by_tier: dict[str, Amounts]
    end_user: str | None = None
    entries: dict[Name, list[Entry]] = field(default_factory=dict)


class Model:
    """All that was ever entered."""

    def __init__(self) -> None:
        self.entries: dict[Name, list[Entry]] = {}

    def reserve(self, principal: Principal, want: Want, now_s: float) -> Held | None:
        """None: a limit has no room."""
        held = Held(principal, want.most, dict(want.by_tier))
        return held if self.enter(held, want.most, want.by_tier, now_s) else None

    def grow(self, held: Held, want: Want, now_s: float) -> bool:
        """Only ever by tokens and money, on tiers that are held."""
        more = Amounts(requests=0, tokens=want.most.tokens, usd_nanos=want.most.usd_nanos)
        if not self.enter(held, more, want.by_tier, now_s):
            return False
        held.overall = _sum([held.overall, more])
        for tier, amounts in want.by_tier.items():
            held.by_tier[tier] = _sum([held.by_tier[tier], amounts])
        return True

    def count_for(self, held: Held, end_user: str, now_s: float) -> bool:
        """Once for a request: with what it holds, and from then on."""
        skipped = [name for name, _ in limits_of(held.principal)]
        held.end_user = end_user
        if self.enter(held, held.overall, {}, now_s, skipped):
            return True
        held.end_user = None
        return False

    def enter(
        self,
        held: Held,
        overall: Amounts,
        by_tier: Mapping[str, Amounts],
        now_s: float,
        skipped: Collection[Name] = (),
    ) -> bool:
        """All or nothing."""
        asked = []
        for name, limit in limits_of(held.principal, held.end_user):
            if name in skipped:
                continue
            tier = name[2]
            if tier is None or tier in by_tier:
                amount = amount_of(name, overall if tier is None else by_tier[tier])
                asked.append((name, amount))
                if amount and self.used(name, now_s) + amount > limit:
                    return False
        for name, amount in asked:
            entry = Entry(now_s, amount)
            self.entries.setdefault(name, []).append(entry)
            held.entries.setdefault(name, []).append(entry)
        return True

    def settle(self, held: Held, used: Mapping[str, Amounts]) -> None:
        """Keep what was used, of the oldest entries first."""
        for name, entries in held.entries.items():
            tier = name[2]
            total = _sum(list(used.values()))
            mine = total if tier is None else used.get(tier, Amounts(requests=0))
            kept = 0 if name[3] == "concurrent_requests" else amount_of(name, mine)
            if name[3].startswith("requests") and tier is None:
                kept = max((a.requests for a in used.values()), default=0)
            for entry in entries:
                entry.amount, kept = min(entry.amount, kept), kept - min(entry.amount, kept)

    def used(self, name: Name, now_s: float) -> int:
        """Return the usage now: an amount counts in its second and the 60 after it; or its day."""
        entries = self.entries.get(name, [])
        if name[3].endswith("minute"):
            oldest = math.floor(now_s) - 60
            return sum(e.amount for e in entries if math.floor(e.at_s) >= oldest)
        if name[3].endswith("day"):
            return sum(e.amount for e in entries if e.at_s // 86_400 == now_s // 86_400)
        if name[3].endswith("week"):
            return sum(e.amount for e in entries if _week(e.at_s) == _week(now_s))
        if name[3].endswith("days"):
            first = now_s // 86_400 - int(name[3].split("_")[2]) + 1
            return sum(e.amount for e in entries if e.at_s // 86_400 >= first)
        if name[3].endswith("month"):
            return sum(e.amount for e in entries if _month(e.at_s) == _month(now_s))
        return sum(e.amount for e in entries)

    def most_in_60_s(self, name: Name) -> int:
        """The largest sum of any 60 seconds, wherever they begin, both ends included."""
        entries = self.entries.get(name, [])
        return max(
            (
                sum(e.amount for e in entries if first.at_s <= e.at_s <= first.at_s + 60)
                for first in entries
            ),
            default=0,
        )


def limits_of(principal: Principal, end_user: str | None = None) -> Iterator[tuple[Name, int]]:
    """All limits of a principal that are set, and of its end user."""
    owners = [("key", principal.key_id, principal.limits)]
    if principal.team_id is not None:
        owners.append(("team", principal.team_id, principal.team_limits))
    if end_user is not None:
        theirs = [(f"{owner} {end_user}", spec.end_user) for _, owner, spec in owners]
        owners += [("end_user", name, spec) for name, spec in theirs if spec is not None]
    for scope, owner, spec in owners:
        for tier, limits in [(None, spec), *spec.models.items()]:
            for limit_name in LimitSpec.model_fields:
                limit = getattr(limits, limit_name)
                if limit_name not in ("models", "end_user") and limit is not None:
                    factor = 10**9 if limit_name.startswith("usd") else 1
                    yield (scope, owner, tier, limit_name), round(limit * factor)


def amount_of(name: Name, amounts: Amounts) -> int:
    """The amount that this limit counts."""
    if name[3].startswith("tokens"):
        return amounts.tokens
    return amounts.usd_nanos if name[3].startswith("usd") else amounts.requests


def _sum(amounts: list[Amounts]) -> Amounts:
    return Amounts(
        requests=sum(a.requests for a in amounts),
        tokens=sum(a.tokens for a in amounts),
        usd_nanos=sum(a.usd_nanos for a in amounts),
    )


def _week(at_s: float) -> tuple[int, int]:
    return datetime.fromtimestamp(at_s, UTC).isocalendar()[:2]


def _month(at_s: float) -> tuple[int, int]:
    date = datetime.fromtimestamp(at_s, UTC)
    return date.year, date.month
