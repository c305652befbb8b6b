"""The wait that a server's headers ask for."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

MAX_WAIT_S: Final = 86_400.0


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait by `retry-after-ms` or `retry-after` (RFC 9110, section 10.2.3).

    None where there is neither, or neither can be read; a day for all longer waits. `headers` have
    lower-case names. A date is compared with the server's own `date`, so that its clock need not be
    right.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value.isascii() and value.replace(".", "", 1).isdigit():
            return min(float(value) * unit_s, MAX_WAIT_S)
    until_s = _seconds(headers.get("retry-after", ""))
    if until_s is None:
        return None
    now_s = _seconds(headers.get("date", ""))
    return min(max(0.0, until_s - (time.time() if now_s is None else now_s)), MAX_WAIT_S)


def _seconds(date: str) -> float | None:
    """Return an HTTP date as seconds since 1970; None for an invalid one."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
