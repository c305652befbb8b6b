"""Bounds on what a request may ask for."""

from dataclasses import dataclass, field

from outrider.gateway.contract.schema.parsing import JsonBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds on what a request may ask for."""

    default_max_tokens: int | None = None
    """For a request that sets none; less where the context ends sooner. None: all that the context
    leaves."""
    max_body_bytes: int = 8 * 2**20
    max_prompt_chars: int = 1_000_000
    json_bounds: JsonBounds = field(default_factory=JsonBounds)
