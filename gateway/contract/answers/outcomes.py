"""The outcome of an API request, for the parts that count it: experiments and objectives."""

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

RequestEnding = Literal["answered", "cancelled", "failed", "refused"]
"""Whole; given up by the client; an error of ours or of a server's; refused for what it asks, or
because there was no room for it (status 429)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRef:
    """An arm of an experiment's version. `unit_bucket`, in [0, 64), is of the unit's hash."""

    experiment: str
    version: int
    arm: str
    unit_bucket: int = 0


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One API request that is over and booked. Times are in seconds."""

    request_id: str
    """Ours."""
    client_request_id: str
    """The header's."""
    answer_id: str = ""
    """In the answer's body."""
    key_id: str = ""
    team_id: str = ""
    endpoint: str = ""
    model: str = ""
    tier: str = ""
    """The one that answered; empty for none."""
    ending: RequestEnding = "answered"
    status: int | None = None
    """The one that was sent; None where the client had left."""
    error_code: str | None = None
    ended_at: float = 0.0
    """Since 1970."""
    is_streamed: bool = False
    is_escalated: bool = False
    is_degraded: bool = False
    ttft_s: float | None = None
    """From the request's arrival; None without a token. Where the answer is not streamed, its
    engine's."""
    inter_token_s: float | None = None
    """The mean between the first token and the last."""
    duration_s: float = 0.0
    """From the request's arrival."""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    cost_nanos: int = 0
    """Of all attempts."""
    charge_nanos: int = 0
    slo_class: str = ""
    slo_ttft_s: float | None = None
    """The objective that it was served under; None for none."""
    slo_inter_token_s: float | None = None
    """As `slo_ttft_s`."""
    arms: tuple[ArmRef, ...] = ()
    """None where the arm was forced."""

    @property
    def is_attained(self) -> bool:
        """True if it was answered within all its objectives, if it has any."""
        if self.ending != "answered":
            return False
        pairs = ((self.ttft_s, self.slo_ttft_s), (self.inter_token_s, self.slo_inter_token_s))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


class OutcomeSink(Protocol):
    """Receives every request that is over."""

    def observe(self, outcome: RequestOutcome) -> None:
        """Note the outcome. Called on the event loop: takes microseconds and must not raise."""
