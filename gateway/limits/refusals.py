"""What a request is told that does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors.tree import BudgetError, RateLimitError
from gateway.limits.headers import duration, ratelimit_headers
from gateway.limits.limiter import LimitState
from gateway.limits.lines import Line, Unit
from gateway.tenants.amounts import NANOS_PER_USD


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line that has no room. `wait_s`: until it has, if nobody asks meanwhile."""

    line: Line
    wanted: int
    used: int
    wait_s: float

    @property
    def is_final(self) -> bool:
        """Whether the request would not fit if nothing else were counted."""
        return self.wanted > self.line.limit


def decisive(refusals: Sequence[Refusal]) -> Refusal:
    """The one that keeps the request out for longest."""
    return max(refusals, key=lambda r: (r.is_final, r.wait_s, r.line.unit == "usd_nanos"))


def refusal_error(
    refusals: Sequence[Refusal], states: Sequence[LimitState]
) -> RateLimitError | BudgetError:
    """The error of the line that keeps the request out for longest."""
    refusal = decisive(refusals)
    line = refusal.line
    headers = ratelimit_headers(states)
    if refusal.is_final:
        return BudgetError(_never_fits(refusal), headers=headers, limit=line.name, tier=line.model)
    message = _no_room(refusal)
    if line.unit == "usd_nanos":
        return BudgetError(
            message,
            reset_s=refusal.wait_s,
            headers=headers,
            limit=line.name,
            tier=line.model,
        )
    return RateLimitError(
        message,
        retry_after_s=refusal.wait_s,
        headers=headers,
        limit=line.name,
        tier=line.model,
    )


def _never_fits(refusal: Refusal) -> str:
    line = refusal.line
    if not line.limit:
        return f"{_limit(line)} is 0: it allows nothing."
    message = (
        f"This request may take {_amount(refusal.wanted, line.unit)}, and {_limit(line, 'the')} "
        f"is {_amount(line.limit, line.unit)}: it can never be let in."
    )
    if line.unit == "requests":
        return message
    return f"{message} Send a shorter prompt or a smaller max_tokens."


def _no_room(refusal: Refusal) -> str:
    line = refusal.line
    if line.period == "open":
        return (
            f"{_limit(line)} is {line.limit:,}, and {refusal.used:,} are under way. "
            "Try again when one of them has ended."
        )
    return (
        f"{_limit(line)} is {_amount(line.limit, line.unit)}: "
        f"{_amount(refusal.used, line.unit)} are used or reserved, and this request may take "
        f"{_amount(refusal.wanted, line.unit)}. It fits in {duration(refusal.wait_s)}."
    )


def _limit(line: Line, article: str = "The") -> str:
    of = f" for {line.model}" if line.model is not None else ""
    return f"{article} {line.scope}'s limit {line.name}{of}"


def _amount(amount: int, unit: Unit) -> str:
    match unit:
        case "usd_nanos":
            return f"${_dollars(amount)}"
        case "tokens":
            return f"{amount:,} token{'' if amount == 1 else 's'}"
        case "requests":
            return f"{amount:,} request{'' if amount == 1 else 's'}"


def _dollars(nanos: int) -> str:
    """To the last billionth: what is compared is what is told."""
    whole, rest = divmod(nanos, NANOS_PER_USD)
    cents = f"{rest:09d}".rstrip("0").ljust(2, "0")
    return f"{whole:,}.{cents}"
