"""Tokens that a request to an upstream tier took, and their source."""

from dataclasses import dataclass

from outrider.gateway.contract.schema.kinds import Units, UsageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamUsage:
    """Tokens of one answer, and images or sound (`units`).

    `is_corrected`: the server's report differed from the count.
    """

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    source: UsageSource = "reported"
    is_corrected: bool = False
    units: Units | None = None
