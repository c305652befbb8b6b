"""What of the OpenAPI document depends on the models and tiers of a gateway: names and bounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_TOKEN_COUNTS: Final = frozenset(
    {"max_tokens", "max_completion_tokens", "min_tokens", "max_output_tokens"}
)
_OTHER_REQUESTS: Final = frozenset(
    {
        "MessagesRequest",
        "CountTokensRequest",
        "InputTokensRequest",
        "TokenizePrompt",
        "TokenizeMessages",
        "DetokenizeRequest",
        "OllamaChatRequest",
        "OllamaGenerateRequest",
        "OllamaShowRequest",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLimits:
    """Limits of the loaded models; the largest where they differ.

    `names` is None if any name may be valid: upstream servers may have others.
    """

    names: tuple[str, ...] | None
    max_context: int
    vocab_size: int


def add_tiers(schemas: dict[str, Any], tiers: Sequence[str]) -> None:
    """Name the tiers that keys may have limits for; a limit of another may only be deleted."""
    made = schemas["KeyLimits"]["properties"]["models"]
    changed = _branch(schemas["LimitsPatch"]["properties"]["models"], "object")
    for models, others in ((made, False), (changed, {"type": "null"})):
        (limits,) = models.pop("patternProperties").values()
        models["properties"] = dict.fromkeys(tiers, limits)
        models["additionalProperties"] = others


def add_limits(schemas: dict[str, Any], limits: LoadedLimits) -> None:
    """Names and upper bounds that depend on what is loaded."""
    for request in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        if request not in schemas:
            continue
        properties = schemas[request]["properties"]
        if limits.names is not None:
            properties["model"]["enum"] = list(limits.names)
        for name in _TOKEN_COUNTS & properties.keys():
            _branch(properties[name], "integer")["maximum"] = limits.max_context - 1
        stops = _branch(properties["stop_token_ids"], "array")
        stops["items"]["maximum"] = limits.vocab_size - 1
        biases = _branch(properties["logit_bias"], "object")
        biases["propertyNames"]["pattern"] = f"^({_at_most(limits.vocab_size - 1)})$"
    if "DetokenizeRequest" in schemas:
        tokens = schemas["DetokenizeRequest"]["properties"]["tokens"]
        tokens["items"]["maximum"] = limits.vocab_size - 1
    for branch in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        items = branch.get("items", {})
        for schema in (items, items.get("items", {})):
            if schema.get("type") == "integer":
                schema["maximum"] = limits.vocab_size - 1


def add_names(schemas: dict[str, Any], limits: LoadedLimits) -> None:
    """The same for requests that are read in other ways; those that name no model mean `auto`."""
    for request in _OTHER_REQUESTS & schemas.keys():
        properties = schemas[request]["properties"]
        if limits.names is not None:
            model = properties["model"]
            names = _branch(model, "string") if "anyOf" in model else model
            names["enum"] = list(limits.names)
        if "tokens" in properties:
            properties["tokens"]["items"]["maximum"] = limits.vocab_size - 1


def _branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The branch of a nullable field that has this type."""
    branches: list[dict[str, Any]] = schema["anyOf"]
    return next(branch for branch in branches if branch.get("type") == kind)


def _at_most(largest: int) -> str:
    """A regular expression for the decimal numbers from 0 to `largest`, without leading zeros."""
    digits = str(largest)
    numbers = ["0", *(f"[1-9][0-9]{{{length}}}" for length in range(len(digits) - 1))]
    for index, digit in enumerate(digits):  # the same up to here, then a smaller digit
        least = "1" if index == 0 else "0"
        if digit > least:
            rest = len(digits) - 1 - index
            numbers.append(f"{digits[:index]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join([*numbers, digits])
