"""The limits that count a request, as rules that a reservation is entered on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, Amounts, LimitName, LimitSpec, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.headers import TOLD_UNITS
from outrider.gateway.tenancy.limits.limiter import LimitState, Scope

Unit = Literal["requests", "tokens", "usd_nanos"]
Period = Literal["minute", "day", "week", "month", "7_days", "30_days", "open"]
"""The period for which an amount counts; open: until the request ends."""

_MEANINGS: Final[Mapping[LimitName, tuple[Unit, Period]]] = {
    "requests_per_minute": ("requests", "minute"),
    "tokens_per_minute": ("tokens", "minute"),
    "requests_per_day": ("requests", "day"),
    "tokens_per_day": ("tokens", "day"),
    "concurrent_requests": ("requests", "open"),
    "usd_per_day": ("usd_nanos", "day"),
    "usd_per_week": ("usd_nanos", "week"),
    "usd_per_month": ("usd_nanos", "month"),
    "usd_per_7_days": ("usd_nanos", "7_days"),
    "usd_per_30_days": ("usd_nanos", "30_days"),
}
_ORDER: Final = {name: index for index, name in enumerate(get_args(LimitName))}

LimitDemand = tuple[int, int]
"""The position of a rule in its plan, and the amount demanded of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRule:
    """One limit of one key or team, or of each of its end users."""

    scope: Scope
    owner: str
    """The id of the key or team."""
    model: str | None
    """The tier that it limits; None: all tiers together."""
    name: LimitName
    limit: int
    """The limit's amount, in `unit`s a `period`."""
    unit: Unit
    period: Period

    def state(self, used: int, reset_s: float) -> LimitState:
        """Return the state for headers, where `used` is used or reserved."""
        return LimitState(
            scope=self.scope,
            name=self.name,
            limit=self.limit,
            remaining=max(0, self.limit - used),
            reset_s=reset_s,
            model=self.model,
        )


class LimitPlan:
    """The rules of one principal. `rules` never changes; demands name rules by position."""

    __slots__ = ("_by_model", "_overall", "for_end_users", "is_told", "principal", "rules")

    def __init__(self, principal: Principal, end_users: Sequence[LimitRule] | None = None) -> None:
        """`end_users`: the rules of an end user, which come last; None: the plan has none yet."""
        self.principal = principal
        self.rules: tuple[LimitRule, ...] = (*_rules(principal), *(end_users or ()))
        self.for_end_users: LimitPlan | None = None
        """The plan with the rules of an end user; None where there are none."""
        if end_users is None and (theirs := tuple(_end_user_rules(principal))):
            self.for_end_users = LimitPlan(principal, theirs)
        self.is_told = tuple(rule.name in TOLD_UNITS for rule in self.rules)
        self._overall: list[tuple[int, Unit]] = []
        self._by_model: dict[str, list[tuple[int, Unit]]] = {}
        for i, rule in enumerate(self.rules):
            own = self._overall
            if rule.model is not None:
                own = self._by_model.setdefault(rule.model, [])
            own.append((i, rule.unit))

    def is_of(self, principal: Principal) -> bool:
        """Return whether these are the principal's rules: of another end user they may be."""
        own = self.principal
        return own is principal or (
            own.limits is principal.limits
            and own.team_limits is principal.team_limits
            and own.team_id == principal.team_id
        )

    def demands(self, overall: Amounts, by_tier: Mapping[str, Amounts]) -> list[LimitDemand]:
        """Return the demand on each rule that counts the request, 0 included."""
        asked = _by_unit(overall)
        demands = [(i, asked[unit]) for i, unit in self._overall]
        if self._by_model:
            for tier, amounts in by_tier.items():
                asked = _by_unit(amounts)
                demands += [(i, asked[unit]) for i, unit in self._by_model.get(tier, ())]
        return demands

    def demands_from(self, first: int, overall: Amounts) -> list[LimitDemand]:
        """Return the demands on the rules over all tiers from this position on."""
        asked = _by_unit(overall)
        return [(i, asked[unit]) for i, unit in self._overall if i >= first]


class Holding:
    """The amounts that one request has reserved: by tier, and of all tiers together."""

    __slots__ = ("by_tier", "overall")

    def __init__(self, by_tier: Mapping[str, Amounts], overall: Amounts) -> None:
        self.by_tier = dict(by_tier)
        self.overall = overall

    def growth(self, more: Want) -> tuple[Amounts, dict[str, Amounts]]:
        """Return the demand beyond what is held: of all tiers together, and by tier.

        A request that grows onto another tier still counts as one request.
        """
        most = more.most
        merged = _merge(self.by_tier, more.by_tier)
        requests = max((a.requests for a in merged.values()), default=0)
        overall = Amounts(
            requests=max(0, requests - self.overall.requests),
            tokens=most.tokens,
            usd_nanos=most.usd_nanos,
        )
        return overall, dict(more.by_tier)

    def add(self, overall: Amounts, by_tier: Mapping[str, Amounts]) -> None:
        """Add amounts that were reserved."""
        self.overall = _plus(self.overall, overall)
        self.by_tier = _merge(self.by_tier, by_tier)

    def spend(self, used: Mapping[str, Amounts]) -> tuple[Amounts, str]:
        """Return the use of all tiers together, and how it exceeds the reservation, or "".

        Tokens and money of several tiers add up; requests do not.
        """
        total = _total(used.values())
        for tier, amounts in used.items():
            held = self.by_tier.get(tier)
            if held is None or not _fits(amounts, held):
                return total, f"tier {tier!r}: used {amounts}, reserved {held}"
        if not _fits(total, self.overall):
            return total, f"all tiers: used {total}, reserved {self.overall}"
        return total, ""


def _by_unit(amounts: Amounts) -> dict[Unit, int]:
    return {
        "requests": amounts.requests,
        "tokens": amounts.tokens,
        "usd_nanos": amounts.usd_nanos,
    }


def ordered(states: Sequence[LimitState]) -> tuple[LimitState, ...]:
    """Sort states by name, the tightest of each name first."""
    return tuple(sorted(states, key=lambda state: (_ORDER[state.name], state.remaining)))


def _rules(principal: Principal) -> Iterator[LimitRule]:
    yield from _rules_of("key", principal.key_id, principal.limits)
    if principal.team_id is not None:
        yield from _rules_of("team", principal.team_id, principal.team_limits)


def _end_user_rules(principal: Principal) -> Iterator[LimitRule]:
    if principal.limits.end_user is not None:
        yield from _rules_of("end_user", principal.key_id, principal.limits.end_user)
    if principal.team_id is not None and principal.team_limits.end_user is not None:
        yield from _rules_of("end_user", principal.team_id, principal.team_limits.end_user)


def _rules_of(scope: Scope, owner: str, spec: LimitSpec) -> Iterator[LimitRule]:
    for model, limits in ((None, spec), *spec.models.items()):
        for name, (unit, period) in _MEANINGS.items():
            limit = getattr(limits, name)
            if limit is not None:
                yield LimitRule(
                    scope=scope,
                    owner=owner,
                    model=model,
                    name=name,
                    limit=round(limit * NANOS_PER_USD) if unit == "usd_nanos" else limit,
                    unit=unit,
                    period=period,
                )


def _fits(amounts: Amounts, held: Amounts) -> bool:
    """Return whether each amount is within what is held."""
    return (
        amounts.requests <= held.requests
        and amounts.tokens <= held.tokens
        and amounts.usd_nanos <= held.usd_nanos
    )


def _total(used: Collection[Amounts]) -> Amounts:
    """Return the sum; the request itself counts once."""
    if len(used) == 1:  # by far the most requests
        return next(iter(used))
    return Amounts(
        requests=max((amounts.requests for amounts in used), default=0),
        tokens=sum(amounts.tokens for amounts in used),
        usd_nanos=sum(amounts.usd_nanos for amounts in used),
    )


def _plus(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(
        requests=one.requests + other.requests,
        tokens=one.tokens + other.tokens,
        usd_nanos=one.usd_nanos + other.usd_nanos,
    )


def _merge(one: Mapping[str, Amounts], other: Mapping[str, Amounts]) -> dict[str, Amounts]:
    merged = dict(one)
    for tier, amounts in other.items():
        merged[tier] = _plus(merged[tier], amounts) if tier in merged else amounts
    return merged
