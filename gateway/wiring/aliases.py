"""Aliases as the settings have them, with their defaults checked."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.unknown_fields import HINTS
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.tree import Settings, SettingsError

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
