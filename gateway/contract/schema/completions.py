"""POST /v1/completions: the request."""

from typing import Annotated

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.common import (
    MAX_TOP_LOGPROBS,
    WHOLE,
    Harmless,
    ListOf,
    One,
    TokenId,
)
from outrider.gateway.contract.schema.structured import StructuredFields

MAX_PROMPTS = 16

NoSuffix = Annotated[
    JsonValue,
    Harmless((None, ""), "the models cannot fill in text in front of a suffix"),
]
PromptText = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
PromptInput = (
    PromptText
    | Annotated[ListOf[PromptText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(StructuredFields):
    """Text or token ids to continue, without a chat template."""

    prompt: PromptInput
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None

    echo: Annotated[
        bool | None,
        Field(description="true: the text begins with the prompt, and so do log-probabilities."),
    ] = None
    best_of: One = None
    suffix: NoSuffix = None

    @property
    def has_extras(self) -> bool:
        """True if more is asked of the tokens than text and log-probabilities of the answer."""
        return bool(self.echo) or super().has_extras

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The fields that were given and do nothing without another one."""
        is_idle = self.return_tokens_as_token_ids and self.logprobs is None
        return (*super().idle_fields, *(("return_tokens_as_token_ids",) if is_idle else ()))

    @property
    def top_count(self) -> int | None:
        """The number of alternatives for each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """The most tokens a choice may have; None for the server's default."""
        return self.max_tokens

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each prompt on its own, as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return (prompt,)
        if isinstance(prompt[0], int):
            return (tuple(item for item in prompt if isinstance(item, int)),)
        return tuple(
            item if isinstance(item, str) else tuple(item)
            for item in prompt
            if not isinstance(item, int)
        )
