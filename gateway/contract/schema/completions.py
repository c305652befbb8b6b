"""POST /v1/completions: the request."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from outrider.gateway.contract.schema.common import (
    MAX_TOP_LOGPROBS,
    WHOLE,
    Ignored,
    Label,
    ListOf,
    One,
    RequestModel,
    TokenId,
)
from outrider.gateway.contract.schema.structured import StructuredFields

MAX_PROMPTS = 16
MAX_EXTRA_FILES = 1024


class ExtraFile(RequestModel):
    """Another file, or a part of one, as context: llama.cpp's."""

    filename: Label | None = None
    text: str
    time: Ignored = None


def _check_text(text: str, info: ValidationInfo) -> str:
    """Refuse an empty text, unless text is to be filled in behind it."""
    if not text and not _fills_in(info):
        raise PydanticCustomError("string_too_short", "String should have at least 1 character")
    return text


def _check_echo(echo: bool | None, info: ValidationInfo) -> bool | None:
    """Refuse what OpenAI refuses as well: a text in the middle has no prompt in front."""
    if echo and _fills_in(info):
        raise PydanticCustomError("echo", "not supported together with suffix")
    return echo


def _fills_in(info: ValidationInfo) -> bool:
    """Return whether the fields so far ask for text in the middle."""
    return bool(info.data.get("suffix")) or info.data.get("input_extra") is not None


PromptText = Annotated[str, AfterValidator(_check_text)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
PromptInput = (
    PromptText
    | Annotated[ListOf[PromptText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(StructuredFields):
    """Text or token ids to continue, without a chat template."""

    # In front of the prompt, which may then be empty.
    suffix: Annotated[
        str | None,
        Field(description="The text behind the answer, which is filled in between; empty: none."),
    ] = None
    input_extra: Annotated[
        Annotated[ListOf[ExtraFile], Field(max_length=MAX_EXTRA_FILES)] | None,
        Field(
            description="llama.cpp's field; other files as context of text that is filled in, an "
            "empty list for none. With it the suffix may be empty."
        ),
    ] = None
    prompt: PromptInput
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None

    echo: Annotated[
        bool | None,
        AfterValidator(_check_echo),
        Field(description="true: the text begins with the prompt, and so do log-probabilities."),
    ] = None
    best_of: One = None

    @property
    def fills_in(self) -> bool:
        """True if the answer is text in the middle, between prompt and suffix."""
        return bool(self.suffix) or self.input_extra is not None

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
