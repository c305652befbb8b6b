"""Tokens that a request to an upstream tier took, and their source."""

from dataclasses import dataclass

from outrider.gateway.contract.schema.kinds import Units, UsageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamUsage:
    """The usage of one answer."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    source: UsageSource = "reported"
    is_corrected: bool = False
    """The server's report differed from the count."""
    units: Units | None = None
    """Images or sound."""
