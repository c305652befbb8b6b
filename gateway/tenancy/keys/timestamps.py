"""Times as people write them."""

import re
from datetime import UTC, datetime
from typing import Final

from outrider.gateway.settings.tree import SettingsError

_DURATION: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(s|m|h|d|w)")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def duration_s(text: str, flag: str) -> float:
    """Return seconds of `90s`, `15m`, `12h`, `30d`, `2w`. Raises SettingsError with the flag."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise SettingsError(f"{flag} {text}: write it as 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


def expiry_s(text: str, flag: str, now_s: float) -> float:
    """Return seconds since 1970 of a duration from now, or of a date: `30d`, `2027-01-01`.

    Dates are UTC's unless they say otherwise (`2027-01-01T12:00+02:00`). Raises SettingsError,
    naming the flag, also for past times.
    """
    if _DURATION.fullmatch(text.strip().lower()):
        return now_s + duration_s(text, flag)
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SettingsError(f"{flag} {text}: write it as 30d, 12h or 2027-01-01") from None
    when_s = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    if when_s <= now_s:
        raise SettingsError(f"{flag} {text}: this time is in the past")
    return when_s


def date_text(expiry_s: float | None) -> str:
    """Return a time as a date, with its time of day where it is not midnight; UTC."""
    if expiry_s is None:
        return "-"
    date = datetime.fromtimestamp(expiry_s, UTC)
    is_midnight = expiry_s % 86_400 == 0
    return date.strftime("%Y-%m-%d" if is_midnight else "%Y-%m-%d %H:%M")
