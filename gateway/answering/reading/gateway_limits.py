"""Bounds on what a request may ask for."""

from dataclasses import dataclass, field

from outrider.gateway.contract.schema.parsing import JsonBounds
from outrider.gateway.settings.sections import LimitSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds on what a request may ask for."""

    default_max_tokens: int | None = None
    """For a request that sets none; less where the context ends sooner. None: all that the context
    leaves."""
    max_body_bytes: int = 8 * 2**20
    max_prompt_chars: int = 1_000_000
    json_bounds: JsonBounds = field(default_factory=JsonBounds)

    @classmethod
    def of(cls, settings: LimitSettings) -> "GatewayLimits":
        """Return the limits of the settings."""
        return cls(
            default_max_tokens=settings.default_max_tokens,
            max_body_bytes=settings.max_body_bytes,
            max_prompt_chars=settings.max_prompt_chars,
            json_bounds=JsonBounds(
                max_values=settings.max_json_values,
                max_objects=settings.max_json_objects,
                max_fields=settings.max_json_fields,
                max_strings=settings.max_json_strings,
                max_nesting=settings.max_json_nesting,
            ),
        )
