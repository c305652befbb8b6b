"""Known services that speak OpenAI's dialect: their addresses, and how to sign in there."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from outrider.gateway.contract.schema.kinds import ServerKind

SignIn = Literal["key", "api_key_header", "entra", "google", "aws"]
"""key: a bearer token. api_key_header: Azure's header. The others fetch tokens or sign requests."""
PresetName = Literal[
    "openai",
    "anthropic",
    "azure",
    "bedrock",
    "vertex",
    "gemini",
    "openrouter",
    "groq",
    "cerebras",
    "together",
    "fireworks",
    "mistral",
    "deepseek",
    "xai",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A service."""

    url: str
    """May name {region}, {project} and {resource}."""
    key_env: str | None = None
    """The variable that holds its key."""
    sign_in: SignIn = "key"
    other_sign_in: tuple[SignIn, ...] = ()
    server: ServerKind = "openai"


_AWS_REGION: Final = (r"[a-z]{2}(-[a-z]+)+-\d", "us-east-1")
_GOOGLE_REGION: Final = (r"global|[a-z]+(-[a-z]+)+\d+", "us-central1 or global")
_PLACES: Final[Mapping[str, tuple[str, str]]] = {
    "project": (r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "my-project-1"),
    "resource": (r"[A-Za-z0-9][A-Za-z0-9-]{0,62}[A-Za-z0-9]", "my-resource"),
}

PRESETS: Final[Mapping[str, Preset]] = {
    "openai": Preset(url="https://api.openai.com/v1", key_env="OPENAI_API_KEY"),
    "anthropic": Preset(
        url="https://api.anthropic.com/v1", key_env="ANTHROPIC_API_KEY", server="anthropic"
    ),
    "azure": Preset(
        url="https://{resource}.openai.azure.com/openai/v1",
        key_env="AZURE_OPENAI_API_KEY",
        sign_in="api_key_header",
        other_sign_in=("entra",),
    ),
    "bedrock": Preset(
        url="https://bedrock-runtime.{region}.amazonaws.com/openai/v1",
        key_env="AWS_BEARER_TOKEN_BEDROCK",
        other_sign_in=("aws",),
    ),
    "vertex": Preset(
        url="https://{host}/v1/projects/{project}/locations/{region}/endpoints/openapi",
        sign_in="google",
        other_sign_in=("key",),
    ),
    "gemini": Preset(
        url="https://generativelanguage.googleapis.com/v1beta/openai", key_env="GEMINI_API_KEY"
    ),
    "openrouter": Preset(url="https://openrouter.ai/api/v1", key_env="OPENROUTER_API_KEY"),
    "groq": Preset(url="https://api.groq.com/openai/v1", key_env="GROQ_API_KEY"),
    "cerebras": Preset(url="https://api.cerebras.ai/v1", key_env="CEREBRAS_API_KEY"),
    "together": Preset(url="https://api.together.xyz/v1", key_env="TOGETHER_API_KEY"),
    "fireworks": Preset(url="https://api.fireworks.ai/inference/v1", key_env="FIREWORKS_API_KEY"),
    "mistral": Preset(url="https://api.mistral.ai/v1", key_env="MISTRAL_API_KEY"),
    "deepseek": Preset(url="https://api.deepseek.com/v1", key_env="DEEPSEEK_API_KEY"),
    "xai": Preset(url="https://api.x.ai/v1", key_env="XAI_API_KEY"),
}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier's settings with what its preset adds to those that are not set.

    Raises ValueError for a place that is missing or cannot be one.
    """
    filled = dict(values)
    name = filled.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return filled
    if not filled.get("url"):
        filled["url"] = _url(str(name), preset, filled)
    filled.setdefault("server", preset.server)
    sign_in = filled.get("sign_in")
    if sign_in is None:
        sign_in = filled["sign_in"] = preset.sign_in
    elif sign_in not in (allowed := (preset.sign_in, *preset.other_sign_in)):
        raise ValueError(f"sign_in {sign_in!r} is not one of {name}'s: {', '.join(allowed)}")
    sources = ("api_key_env", "api_key_file", "api_key_command")
    if sign_in in ("key", "api_key_header") and not any(filled.get(s) for s in sources):
        filled["api_key_env"] = preset.key_env
    return filled


def _url(name: str, preset: Preset, values: Mapping[str, Any]) -> str:
    places: dict[str, str] = {}
    for place in re.findall(r"\{(region|project|resource)\}", preset.url):
        pattern, example = _PLACES.get(place, _AWS_REGION if name == "bedrock" else _GOOGLE_REGION)
        given = values.get(place)
        if not isinstance(given, str) or not given:
            raise ValueError(f"the preset {name} needs {place}, such as {example}")
        if not re.fullmatch(pattern, given):
            raise ValueError(f"{place} {given!r} cannot be one of {name}; write it like {example}")
        places[place] = given
    region = places.get("region", "")
    host = "aiplatform.googleapis.com"
    places["host"] = host if region == "global" else f"{region}-{host}"
    return preset.url.format(**places)
