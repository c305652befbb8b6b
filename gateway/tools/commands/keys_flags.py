"""Limits and labels of keys and teams, as `outrider keys` takes them on the command line."""

from collections.abc import Iterator
from typing import Any, Final

from outrider.gateway.settings.tree import SettingsError

NO_VALUE: Final = "none"
"""The value that deletes a limit, a label or an expiry date."""


def model_limits_of(texts: list[str]) -> dict[str, dict[str, float]]:
    """Parse `TIER:LIMIT=N` texts. Raises SettingsError for any other form."""
    limits: dict[str, dict[str, float]] = {}
    for text in texts:
        # Names of tiers may have colons, names of limits have none.
        tier, colon, rest = text.rpartition(":")
        name, equals, number = (part.strip() for part in rest.partition("="))
        try:
            value = float(number) if name.startswith("usd") else int(number)
        except ValueError:
            value = -1
        if not (tier.strip() and colon and equals and value >= 0):
            raise SettingsError(f"--model-limit {text}: write it as large:tokens_per_minute=10000")
        limits.setdefault(tier.strip(), {})[name] = value
    return limits


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def patches(
    limits: list[str] | None, model_limits: list[str] | None, labels: list[str] | None
) -> dict[str, Any]:
    """Return the changes of limits and labels, as the body of a PATCH has them."""
    patch: dict[str, Any] = {}
    own = {name: _amount(name, text) for name, text in _pairs(limits, "--limit")}
    for path, text in _pairs(model_limits, "--model-limit"):
        tier, _, name = path.rpartition(":")
        if not tier:
            raise SettingsError(
                f"--model-limit {path}={text}: write it as large:tokens_per_minute=10000"
            )
        own.setdefault("models", {}).setdefault(tier, {})[name] = _amount(name, text)
    if own:
        patch["limits"] = own
    if labels:
        pairs = _pairs(labels, "--label")
        patch["labels"] = {name: None if text == NO_VALUE else text for name, text in pairs}
    return patch


def _pairs(texts: list[str] | None, flag: str) -> Iterator[tuple[str, str]]:
    """Parse `NAME=VALUE` texts. Raises SettingsError for any other form."""
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise SettingsError(f"{flag} {text}: write it as NAME=VALUE, or NAME=none to delete it")
        yield name, value


def _amount(name: str, text: str) -> Any:
    """Parse a limit's number; None for `none`. The schema refuses what is not a number."""
    if text == NO_VALUE:
        return None
    try:
        return float(text) if name.startswith("usd") else int(text)
    except ValueError:
        return text


def labels_of(texts: list[str]) -> dict[str, str]:
    """Parse `NAME=TEXT` texts. Raises SettingsError for any other form."""
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--label {text}: write it as --label name=text")
        labels[name.strip()] = value.strip()
    return labels
