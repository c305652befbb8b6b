"""Settings without their secrets, to be shown or kept."""

import json
import re
from typing import Any, Final

from outrider.gateway.settings.tree import Settings

_CONCEALED: Final = "**********"
"""As pydantic writes a secret."""
_PASSWORD: Final = re.compile(
    r'(://[^\s"/@:]*:)[^\s"]*(?=@)|([?&]\w*password=)[^\s"&]*', re.IGNORECASE
)


def without_passwords(line: str) -> str:
    """Return a line of settings with passwords in addresses concealed."""
    return _PASSWORD.sub(lambda found: (found[1] or found[2]) + _CONCEALED, line)


def without_headers(settings: Settings) -> Settings:
    """Return settings with the values of tiers' headers concealed."""
    tiers = {
        name: tier.model_copy(update={"headers": dict.fromkeys(tier.headers, _CONCEALED)})
        for name, tier in settings.tiers.items()
    }
    return settings.model_copy(update={"tiers": tiers})


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without secrets."""
    text = without_headers(settings).model_dump_json(exclude_defaults=True)
    found: dict[str, Any] = _shown(json.loads(text))
    return found


def _shown(value: Any) -> Any:
    """Conceal passwords text by text: within JSON one could end at another text's sign."""
    if isinstance(value, dict):
        return {name: _shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return without_passwords(value) if isinstance(value, str) else value
