"""OpenAI's `service_tier`: asks for a request's place in a full queue, and reports it."""

from dataclasses import dataclass
from typing import Final

from engine.request import HIGH, LOW, NORMAL
from gateway.errors.tree import BadRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTier:
    """`priority` is the queue's, `reported` the response's `service_tier`."""

    priority: int
    reported: str


_DEFAULT: Final = ServiceTier(priority=NORMAL, reported="default")
_TIERS: Final = {
    None: _DEFAULT,
    "auto": _DEFAULT,
    "default": _DEFAULT,
    "priority": ServiceTier(priority=HIGH, reported="priority"),
    "flex": ServiceTier(priority=LOW, reported="flex"),
}


def read_service_tier(value: object) -> ServiceTier:
    """Read the requested tier. Raises BadRequestError for one that is not known."""
    if value is None or isinstance(value, str):
        tier = _TIERS.get(value)
        if tier is not None:
            return tier
    known = ", ".join(repr(name) for name in _TIERS if name)
    raise BadRequestError(f"service_tier: must be null or one of {known}.", param="service_tier")
