"""POST /v1/tokenize and /v1/detokenize: vLLM's fields, requests and answers."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from outrider.gateway.contract.schema.chat import Message
from outrider.gateway.contract.schema.common import (
    ListOf,
    NotBuilt,
    Off,
    OptionalModelName,
    RequestModel,
    TokenId,
)
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.gateway.contract.schema.template_variables import TemplateVariables
from outrider.gateway.contract.schema.tools import MAX_TOOLS, Tool, ToolChoice
from outrider.verifier.params import Tier

MAX_TOKENIZED_CHARS = 2**20
MAX_DETOKENIZED_TOKENS = 2**20


class TokenizeFields(RequestModel):
    """Fields of both forms."""

    model: OptionalModelName = None
    return_token_strs: bool | None = None


class TokenizePrompt(TokenizeFields):
    """A text, as /v1/completions reads it."""

    prompt: Annotated[str, Field(max_length=MAX_TOKENIZED_CHARS)]
    add_special_tokens: Annotated[
        bool | None,
        Field(
            description=(
                "Absent and true: with the special tokens that the tokenizer adds to a text (BOS)."
            )
        ),
    ] = None


class TokenizeMessages(TokenizeFields):
    """A conversation, as /v1/chat/completions reads it."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    add_special_tokens: Off = None
    chat_template: NotBuilt = None
    mm_processor_kwargs: NotBuilt = None


class Tokenized(ResponseModel):
    """A prompt's tokens."""

    count: int
    max_model_len: Annotated[int, says("The model's context.")]
    tokens: Sequence[int]
    token_strs: Annotated[
        list[str] | None,
        says(
            "The tokens' texts, if requested; a special token's is its name, and that of a token "
            "that is a part of a character is U+FFFD."
        ),
    ]
    tier: Annotated[Tier, says("The model's tier.")]


class DetokenizeRequest(RequestModel):
    """Tokens, special ones included."""

    model: OptionalModelName = None
    tokens: Annotated[ListOf[TokenId], Field(max_length=MAX_DETOKENIZED_TOKENS)]


class Detokenized(ResponseModel):
    """The text of tokens."""

    prompt: Annotated[str, says("Special tokens are written by their names.")]
    tier: Annotated[Tier, says("The model's tier.")]


class TokenizerInfo(ResponseModel):
    """A tokenizer's control tokens, as evaluation harnesses ask for them."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    model_max_length: Annotated[int, says("The model's context.")]
    tier: Annotated[Tier, says("The model's tier.")]


class TokenCount(ResponseModel):
    """The tokens of a prompt, as /v1/messages reads it."""

    input_tokens: int


class InputTokens(ResponseModel):
    """The tokens of a prompt, as /v1/responses reads it."""

    object: Literal["response.input_tokens"]
    input_tokens: int


TOKENIZE_MODELS: Final[tuple[type, ...]] = (
    TokenizePrompt,
    TokenizeMessages,
    Tokenized,
    DetokenizeRequest,
    Detokenized,
    TokenizerInfo,
)
