"""W3C Trace Context: the headers by which a trace goes from one service to the next.

https://www.w3.org/TR/trace-context/
"""

import re
from dataclasses import dataclass
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteParent:
    """The caller's span. `state` holds the entries of other tracing systems, as they came."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    def header(self) -> str:
        """Return the caller's `traceparent`, in the version that we support."""
        return traceparent(self.trace_id, self.span_id, is_sampled=self.is_sampled)


def traceparent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """Return the header's value."""
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if is_sampled else '00'}"


def read_parent(header: str | None, state: str | None) -> RemoteParent | None:
    """Return the caller's span; None where it names none, or not in the standard's form."""
    if header is None:
        return None
    found = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if found is None or found["version"] == "ff":
        return None
    if found["version"] == "00" and found["rest"] is not None:
        return None
    trace_id, span_id = int(found["trace_id"], 16), int(found["span_id"], 16)
    if not trace_id or not span_id:
        return None
    return RemoteParent(
        trace_id=trace_id,
        span_id=span_id,
        is_sampled=bool(int(found["flags"], 16) & _SAMPLED),
        state=state if state and _TRACESTATE.fullmatch(state) else "",
    )
