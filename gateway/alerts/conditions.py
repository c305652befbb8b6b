"""What is watched, and what is sent about it."""

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The present state of a subject."""

    subject: str
    """Such as `breaker/TIER/SERVER`."""
    event: str
    """The event that led to this state, such as `breaker.opened`."""
    is_trouble: bool = False
    """An untroubled state is told of only after a troubled one."""
    is_once: bool = False
    """Told of once for ever, such as a day's budget."""
    data: Mapping[str, Any] = field(default_factory=dict)


Source = Callable[[], Awaitable[Sequence[Condition]]]
"""Returns the present conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What is posted, in the form of Standard Webhooks (standardwebhooks.com)."""

    alert_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    event: str
    at_s: float
    """Seconds since 1970 (UTC)."""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON."""
        moment = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds")
        document = {"type": self.event, "timestamp": moment, "data": dict(self.data)}
        return json.dumps(document).encode()
