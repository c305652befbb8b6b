"""Times as people write them: 7d, 2026-01-31, seconds since 1970."""

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final

PATTERN: Final = (
    r"^([0-9]{1,4}[mhdw]|[0-9]{5,11}|"
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})?)?)$"
)
"""The forms that `parse_time` takes; some matching dates do not exist."""

FORMS: Final = "7d, 24h, a date such as 2026-01-31, or seconds since 1970"

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_time(text: str, now_s: float) -> float:
    """Return seconds since 1970 (UTC). `7d` is seven days ago; without a zone, UTC.

    Raises ValueError, with a sentence, for anything else.
    """
    if not re.fullmatch(PATTERN, text):
        raise ValueError(f"{text[:40]!r} is not a time; write {FORMS}")
    if text[-1] in _UNITS:
        return now_s - timedelta(**{_UNITS[text[-1]]: int(text[:-1])}).total_seconds()
    if text.isdigit():
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} does not exist: {error}") from None
    try:
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is too far away")
    return seconds
