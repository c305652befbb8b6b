"""The headers that tell a client how much is left, named as OpenAI names them."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from outrider.gateway.tenancy.keys.amounts import LimitName
from outrider.gateway.tenancy.limits.limiter import LimitState

TOLD_UNITS: Final[Mapping[LimitName, str]] = {
    "requests_per_minute": "requests",
    "requests_per_day": "requests",
    "tokens_per_minute": "tokens",
    "tokens_per_day": "tokens",
}
"""The limits that headers tell of, and what they count."""


def ratelimit_headers(states: Iterable[LimitState]) -> dict[str, str]:
    """Return the headers x-ratelimit-{limit,remaining,reset}-{requests,tokens}.

    Where several limits count requests (or tokens), of key and team, minute and day, the one with
    the least left is shown. Empty where none does.
    """
    tightest: dict[str, LimitState] = {}
    for state in states:
        unit = TOLD_UNITS.get(state.name)
        if unit is not None and (unit not in tightest or _is_tighter(state, tightest[unit])):
            tightest[unit] = state
    headers: dict[str, str] = {}
    for unit, state in tightest.items():
        headers[f"x-ratelimit-limit-{unit}"] = str(state.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(state.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = duration(state.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it, rounded up: 12ms, 1s, 6m0s, 23h59m59s."""
    if seconds < 1:
        return f"{math.ceil(max(0.0, seconds) * 1000)}ms"
    whole = math.ceil(seconds)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _is_tighter(state: LimitState, other: LimitState) -> bool:
    """Return whether less is left, or the same for longer."""
    if state.remaining != other.remaining:
        return state.remaining < other.remaining
    return state.reset_s > other.reset_s
