"""The attempts at an answer from upstream servers, for metrics and for the ledger."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.gateway.upstream.upstream_usage import UpstreamUsage

AttemptKind = Literal["answer", "retry", "hedge", "continuation", "mirror", "probe"]
AttemptOutcome = Literal[
    "answered", "failed", "refused", "lost", "cancelled", "limited", "escalated"
]
"""answered: its text was delivered. refused: the server says that the request is at fault. lost:
another attempt of the same request was faster. cancelled: the client left, or the deadline passed
(see `failure`). limited: a limit of the tenant ended it; the text before that was delivered.
escalated: another tier's answer was delivered, as this one was too weak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamAttempt:
    """One request to one server, when it has ended. Times are seconds on the gateway's clock."""

    request_id: str
    tier: str
    replica: str
    """`host:port`."""
    kind: AttemptKind
    outcome: AttemptOutcome
    started_s: float
    ended_s: float
    first_token_s: float | None = None
    status: int | None = None
    failure: str | None = None
    """A `FailureKind` where there was one."""
    usage: UpstreamUsage | None = None
    cost_usd: float | None = None
    """Our cost. The client's charge is not decided here, but it never pays for `lost` attempts nor
    for mirrors."""
    model: str = ""
    """The requested one."""
    num_repeated_tokens: int = 0
    """Tokens of its answer that the attempt before it had written: a continuation may begin with
    the delivered text."""


OnAttempt = Callable[[UpstreamAttempt], None]
"""Called once for each attempt; must not block."""
