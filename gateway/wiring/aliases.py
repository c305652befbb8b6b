"""Aliases as the settings have them, with their defaults checked and their routers read."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.unknown_fields import HINTS
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.router.files import RouterFileError
from outrider.router.tier_policy import TierPolicy

_QUESTION: Final[Mapping[str, Any]] = {
    "model": "auto",
    "messages": [{"role": "user", "content": "?"}],
}


def checked_aliases(settings: Settings) -> Mapping[str, AliasSettings]:
    """Return the aliases. Raises SettingsError for a default that would be refused.

    Fields that only an upstream server knows are not checked.
    """
    for name, alias in settings.aliases.items():
        known = {
            field: value
            for field, value in alias.defaults.items()
            if field in ChatRequest.model_fields and field not in HINTS
        }
        try:
            parse(ChatRequest, msgspec.json.encode({**_QUESTION, **known}))
        except BadRequestError as error:
            raise SettingsError(f"aliases.{name}.defaults: {error}") from None
    return settings.aliases


def alias_policies(settings: Settings) -> dict[str, TierPolicy]:
    """Load the routers of aliases. Raises SettingsError for one that does not fit its models."""
    policies: dict[str, TierPolicy] = {}
    for name, alias in settings.aliases.items():
        if alias.router is None:
            continue
        try:
            policy = TierPolicy.load(
                alias.router,
                abstains=settings.routing.abstain,
                min_quality=settings.routing.quality,
            )
        except RouterFileError as error:
            raise SettingsError(f"aliases.{name}.router: {error}") from error
        tiers = policy.ladder.names
        if set(tiers) != set(alias.models):
            raise SettingsError(
                f"aliases.{name}.router: {alias.router} knows {', '.join(tiers)}, and the alias's "
                f"models are {', '.join(alias.models)}; name the same ones"
            )
        policies[name] = policy
    return policies
