"""Settings as a commented outrider.toml."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import BaseModel

from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.checks import CheckSettings
from outrider.gateway.settings.experiments import ArmSpec, ExperimentSettings
from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.settings.paths import named_sections
from outrider.gateway.settings.sign_in import GrantSettings, IssuerSettings
from outrider.gateway.settings.tiers import UpstreamSettings


def _arm(overlay: Mapping[str, object]) -> ArmSpec:
    return ArmSpec.model_validate({"set": dict(overlay)})


_EXAMPLES: Final[Mapping[str, tuple[str, BaseModel]]] = {
    "tiers": ("cloud", UpstreamSettings(url=("https://host/v1",))),
    "aliases": (
        "gpt-4o-mini",
        AliasSettings(models=("auto",), defaults={"temperature": 0.2}),
    ),
    "sign_in.issuers": (
        "idp",
        IssuerSettings(
            url="https://idp.example",
            audience=("outrider",),
            grants={"people": GrantSettings(claim="groups", value="ml", team="research")},
        ),
    ),
    "checks": ("private", CheckSettings(redact=("email", "card", "key"))),
    "charges": ("large", UpstreamPriceSettings(prompt=2, completion=8)),
    "experiments": (
        "short-drafts",
        ExperimentSettings(arms={"control": ArmSpec(), "short": _arm({"max_draft_nodes": 4})}),
    ),
}
"""Commented-out examples for sections that users name themselves, written while there are none."""


_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: BaseModel) -> str:
    """Return the settings as a commented outrider.toml. Unset ones are commented out."""
    return "\n".join(_lines("", settings)) + "\n"


def _lines(path: str, section: BaseModel) -> Iterator[str]:
    """Yield the lines of a section's own settings, then those of its subsections."""
    inner: dict[str, BaseModel] = {}
    examples: dict[str, BaseModel] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        where = f"{path}.{name}" if path else name
        if name == "price" and isinstance(section, UpstreamSettings) and not section.has_price:
            examples[where] = value  # written, its zeros would say that tokens are free
        elif isinstance(value, BaseModel):
            inner[where] = value
        elif named_sections(field.annotation) is not None:
            inner |= {f"{where}.{_key(key)}": one for key, one in value.items()}
            if not value:
                key, example = _EXAMPLES[where]
                examples[f"{where}.{key}"] = example
        else:
            if field.description:
                yield f"# {' '.join(field.description.split())}"
            yield f"#{name} =" if value is None else f"{name} = {toml_value(value)}"
    for inner_path, one in inner.items():
        yield from ("", *_comment(one), f"[{inner_path}]")
        yield from _lines(inner_path, one)
    for inner_path, one in examples.items():
        lines = ("", *_comment(one), f"[{inner_path}]", *_lines(inner_path, one))
        yield from (line if not line or line.startswith("#") else f"#{line}" for line in lines)


def _key(name: str) -> str:
    """Write a name as a TOML key: quoted, unless it is letters, digits, _ and - only."""
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """Write a TOML string: JSON's escapes are TOML's, which wants one more of them."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(section: BaseModel) -> Iterator[str]:
    """Yield a section's docstring as comment lines."""
    for line in (type(section).__doc__ or "").splitlines():
        if line.strip():
            yield f"# {line.strip()}"


def toml_value(value: object) -> str:
    """Return a value as TOML spells it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case BaseModel():
            return toml_value(value.model_dump(mode="json", exclude_none=True, by_alias=True))
        case tuple() | list():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case dict():
            pairs = (f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            return _quoted(str(value))
