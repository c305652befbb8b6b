"""The errors of requests that exceed a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD
from outrider.gateway.tenancy.limits.headers import duration, ratelimit_headers
from outrider.gateway.tenancy.limits.limit_rules import LimitRule, Unit
from outrider.gateway.tenancy.limits.limiter import LimitState


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """A rule without room for a demand. `wait_s`: until it has room if nothing else changes."""

    rule: LimitRule
    wanted: int
    used: int
    wait_s: float

    @property
    def is_final(self) -> bool:
        """Return whether the request would not fit even if nothing else were counted."""
        return self.wanted > self.rule.limit


def decisive(refusals: Sequence[LimitRefusal]) -> LimitRefusal:
    """Return the refusal that lasts longest."""
    return max(refusals, key=lambda r: (r.is_final, r.wait_s, r.rule.unit == "usd_nanos"))


def refusal_error(
    refusals: Sequence[LimitRefusal], states: Sequence[LimitState]
) -> RateLimitError | BudgetError:
    """Return the error of the rule that refuses the request for longest."""
    refusal = decisive(refusals)
    rule = refusal.rule
    headers = ratelimit_headers(states)
    if refusal.is_final:
        return BudgetError(_never_fits(refusal), headers=headers, limit=rule.name, tier=rule.model)
    message = _no_room(refusal)
    if rule.unit == "usd_nanos":
        return BudgetError(
            message,
            reset_s=refusal.wait_s,
            headers=headers,
            limit=rule.name,
            tier=rule.model,
        )
    return RateLimitError(
        message,
        retry_after_s=refusal.wait_s,
        headers=headers,
        limit=rule.name,
        tier=rule.model,
    )


def _never_fits(refusal: LimitRefusal) -> str:
    rule = refusal.rule
    if not rule.limit:
        return f"{_limit(rule)} is 0: no request is allowed."
    message = (
        f"This request may take {_amount(refusal.wanted, rule.unit)}, and {_limit(rule, 'the')} "
        f"is {_amount(rule.limit, rule.unit)}: it can never be let in."
    )
    if rule.unit == "requests":
        return message
    return f"{message} Send a shorter prompt or a smaller max_tokens."


def _no_room(refusal: LimitRefusal) -> str:
    rule = refusal.rule
    if rule.period == "open":
        return (
            f"{_limit(rule)} is {rule.limit:,}, and {refusal.used:,} are under way. "
            "Try again when one of them has ended."
        )
    return (
        f"{_limit(rule)} is {_amount(rule.limit, rule.unit)}: "
        f"{_amount(refusal.used, rule.unit)} are used or reserved, and this request may take "
        f"{_amount(refusal.wanted, rule.unit)}. It fits in {duration(refusal.wait_s)}."
    )


def _limit(rule: LimitRule, article: str = "The") -> str:
    of = f" for {rule.model}" if rule.model is not None else ""
    whose = rule.scope.replace("_", " ")
    return f"{article} {whose}'s limit {rule.name}{of}"


def _amount(amount: int, unit: Unit) -> str:
    match unit:
        case "usd_nanos":
            return f"${_dollars(amount)}"
        case "tokens":
            return f"{amount:,} token{'' if amount == 1 else 's'}"
        case "requests":
            return f"{amount:,} request{'' if amount == 1 else 's'}"


def _dollars(nanos: int) -> str:
    """Return dollars to the last billionth: the message shows the exact amount compared."""
    whole, rest = divmod(nanos, NANOS_PER_USD)
    cents = f"{rest:09d}".rstrip("0").ljust(2, "0")
    return f"{whole:,}.{cents}"
