"""Models as Ollama's API lists and describes them."""

from hashlib import sha256
from typing import Final

from pydantic import JsonValue

from outrider.gateway.contract.schema.model_cards import ModelCard, TierCard
from outrider.gateway.http.apis.ollama.answers import (
    LoadedModel,
    ModelDetails,
    OllamaModel,
    ShownModel,
)
from outrider.gateway.http.apis.ollama.writer import rfc3339

_ARCHITECTURE: Final = "outrider"
_NEVER: Final = "9999-12-31T23:59:59Z"
_BYTES: Final = {"float32": 4, "int8": 1}
_CAPABILITIES: Final = {"tools": "tools", "reasoning": "thinking", "images": "vision"}


def listed(card: ModelCard) -> OllamaModel:
    """Return a line of /api/tags."""
    return OllamaModel(
        name=card.id,
        model=card.id,
        modified_at=rfc3339(card.created),
        size=_size(card),
        digest=sha256(card.id.encode()).hexdigest(),
        details=_details(card),
    )


def loaded(card: ModelCard) -> LoadedModel | None:
    """Return a line of /api/ps; None for a name behind which no model of this machine is."""
    if not (tiers := _local(card)):
        return None
    line = listed(card)
    return LoadedModel(
        name=line.name,
        model=line.model,
        modified_at=line.modified_at,
        size=line.size,
        digest=line.digest,
        details=line.details,
        expires_at=_NEVER,
        size_vram=sum(_bytes(tier) for tier in tiers if tier.device.startswith("cuda")),
        context_length=max(tier.max_context for tier in tiers),
    )


def shown(card: ModelCard) -> ShownModel:
    """Return the answer of /api/show."""
    has = {name for tier in card.outrider for name in tier.capabilities}
    info: dict[str, JsonValue] = {
        "general.architecture": _ARCHITECTURE,
        "general.basename": card.id,
    }
    if tiers := _local(card):
        info["general.parameter_count"] = sum(tier.num_parameters for tier in tiers)
    if card.max_context is not None:
        info[f"{_ARCHITECTURE}.context_length"] = card.max_context
    return ShownModel(
        modelfile="",
        parameters="",
        template="",
        details=_details(card),
        model_info=info,
        capabilities=["completion", *(word for name, word in _CAPABILITIES.items() if name in has)],
        modified_at=rfc3339(card.created),
    )


def _local(card: ModelCard) -> list[TierCard]:
    """Return the models of this machine behind a name, as far as the key may know them."""
    return [tier for tier in card.outrider if isinstance(tier, TierCard)]


def _size(card: ModelCard) -> int:
    return sum(_bytes(tier) for tier in _local(card))


def _bytes(tier: TierCard) -> int:
    return tier.num_parameters * _BYTES.get(tier.dtype, 2)


def _details(card: ModelCard) -> ModelDetails:
    tiers = _local(card)
    largest = max(tiers, key=lambda tier: tier.num_parameters, default=None)
    return ModelDetails(
        parent_model="",
        format="safetensors" if tiers else "",
        family=_ARCHITECTURE,
        families=[_ARCHITECTURE],
        parameter_size="" if largest is None else _written(largest.num_parameters),
        quantization_level="" if largest is None else largest.dtype,
    )


def _written(num_parameters: int) -> str:
    """Return a number of parameters as Ollama writes it."""
    for unit, word in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{word}"
    return str(num_parameters)
