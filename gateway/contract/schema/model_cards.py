"""GET /v1/models: the names that `model` accepts, and what answers to them."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from outrider.gateway.contract.schema.kinds import ModelCapability, ModelState, ServerKind
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.verifier.params import Tier

PromptPrice = Annotated[str, says("Price of a prompt's token in USD, as a decimal text.")]
CachedPrice = Annotated[str, says("The same of a token that is found in the cache.")]
CompletionPrice = Annotated[str, says("The same of an answer's token.")]


class LongPromptPricing(ResponseModel):
    """Prices of all tokens of a request with a long prompt."""

    above: Annotated[int, says("The prompt has more tokens than this.")]
    prompt: PromptPrice
    input_cache_read: CachedPrice
    completion: CompletionPrice


class Pricing(ResponseModel):
    """Prices of tokens."""

    currency: Literal["USD"]
    prompt: PromptPrice
    input_cache_read: CachedPrice
    completion: CompletionPrice
    long_prompts: Annotated[
        list[LongPromptPricing] | None, says("There where a long prompt makes a request dearer.")
    ] = None


TierPricing = Annotated[Pricing | None, says("There where the operator has set prices.")]


class TierCard(ResponseModel):
    """The checkpoint behind a tier."""

    tier: Tier
    model_id: str
    max_context: int
    num_parameters: int
    dtype: str
    device: str
    capabilities: list[ModelCapability]
    tool_format: Annotated[str, says("The text in which the model writes calls of tools.")]
    pricing: TierPricing = None


class UpstreamCard(ResponseModel):
    """A tier that is an upstream server."""

    tier: str
    model_id: Annotated[
        str | None, says("What the server is asked for, null where it names no model.")
    ]
    max_context: Annotated[int | None, says("Null where it is unknown.")]
    server: ServerKind
    capabilities: list[ModelCapability]
    state: Annotated[
        ModelState | None, says("Of a model that is loaded on demand; else not there.")
    ] = None
    pricing: TierPricing = None


class ModelCard(ResponseModel):
    """A name that `model` accepts."""

    id: str
    object: Literal["model"]
    created: Annotated[
        int,
        says("Unix time when the weights were written, else when the server started."),
    ]
    owned_by: str
    outrider: Annotated[
        list[TierCard | UpstreamCard],
        says("Which checkpoints may answer, and which upstream servers."),
    ]
    tier: Annotated[str | None, says("Null where several may answer.")]
    max_context: Annotated[int | None, says("The largest of the tiers; null if one is unknown.")]
    max_model_len: Annotated[int | None, says("The same, by vLLM's name.")]
    context_length: Annotated[int | None, says("The same, by OpenRouter's name.")]
    pricing: Annotated[Pricing | None, says("The dearest of the tiers; null if one is unknown.")]


class ModelList(ResponseModel):
    """Every name that `model` accepts."""

    object: Literal["list"]
    data: list[ModelCard]


class NamedModel(ResponseModel):
    """A name that `model` accepts, in the words of Anthropic's API."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: Annotated[str, says("RFC 3339.")]


class NamedModels(ResponseModel):
    """The same of all names, on one page."""

    data: list[NamedModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


def named_model(card: ModelCard) -> NamedModel:
    """Return a card in the words of Anthropic's API."""
    created_at = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return NamedModel(type="model", id=card.id, display_name=card.id, created_at=created_at)
